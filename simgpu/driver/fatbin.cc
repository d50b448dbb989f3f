// Layouts: the wrapper is declared in the toolkit's fatbinary_section.h; container and entry
// headers were verified against the output of nvcc 13.0 and the libraries of its toolkit.
#include "simgpu/driver/fatbin.h"

#include <lz4.h>
#include <sys/mman.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>
#include <vector>

#include "simgpu/driver/log.h"
#include "simgpu/driver/ptx_link.h"

namespace simgpu {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kContainerMagic = 0xba55ed50;
constexpr uint32_t kElfMagic = 0x464c457f;
constexpr uint64_t kFlagLz4 = 0x2000;
constexpr uint64_t kFlagZstd = 0x8000;
constexpr uint16_t kKindPtx = 1;
constexpr size_t kLargestPtx = size_t{1} << 30;
constexpr uint64_t kLargestContainer = uint64_t{8} << 30;
// What a byte can become: zstd's block of one repeated byte, 128 KiB in 4 bytes, is the most.
constexpr uint64_t kLargestRatio = 32768;

struct Wrapper {
  uint32_t magic;
  uint32_t version;
  const void* data;
  const void* filename_or_fatbins;  // version 2: a null-terminated array of containers
};

struct ContainerHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;
};

struct EntryHeader {
  uint16_t kind;
  uint16_t version;
  uint32_t header_bytes;
  uint64_t payload_bytes;     // padded: the next entry follows
  uint32_t compressed_bytes;  // 0: raw
  uint32_t options_offset;
  uint16_t minor;
  uint16_t major;
  uint32_t arch;
  uint32_t name_offset;
  uint32_t name_bytes;
  uint64_t flags;
  uint64_t reserved;
  uint64_t uncompressed_bytes;
};
static_assert(sizeof(EntryHeader) == 64);

struct Candidate {
  EntryHeader header;
  const unsigned char* payload;
};

uint32_t FirstWord(const void* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// Is all of it mapped? A container says itself how long it is; a damaged one must not lead out of
// the program's memory. What cannot be asked (a filter forbids it) is believed.
bool IsMapped(const void* data, uint64_t bytes) {
  constexpr uint64_t kPage = 4096;
  unsigned char pages[1024];
  const uint64_t begin = reinterpret_cast<uint64_t>(data) / kPage * kPage;
  if (bytes > kLargestContainer) return false;
  const uint64_t end = reinterpret_cast<uint64_t>(data) + bytes;
  for (uint64_t at = begin; at < end; at += sizeof(pages) * kPage) {
    const uint64_t piece = std::min<uint64_t>(end - at, sizeof(pages) * kPage);
    if (mincore(reinterpret_cast<void*>(at), piece, pages) != 0 && errno == ENOMEM) return false;
  }
  return true;
}

// The PTX entry that suits the device best; none if the container has machine code only.
std::optional<Candidate> Choose(const void* container, int compute_capability, bool* broken) {
  ContainerHeader header;
  std::memcpy(&header, container, sizeof(header));
  if (header.magic != kContainerMagic || header.header_bytes < sizeof(header) ||
      header.bytes > kLargestContainer ||
      !IsMapped(container, header.header_bytes + header.bytes)) {
    *broken = true;
    return std::nullopt;
  }
  const auto* at = static_cast<const unsigned char*>(container) + header.header_bytes;
  uint64_t left = header.bytes;
  std::optional<Candidate> best;
  while (left >= sizeof(EntryHeader)) {
    EntryHeader entry;
    std::memcpy(&entry, at, sizeof(entry));
    if (entry.header_bytes < sizeof(entry) || entry.header_bytes > left ||
        entry.payload_bytes > left - entry.header_bytes) {
      *broken = true;
      return std::nullopt;
    }
    if (entry.kind == kKindPtx) {
      const auto cc = static_cast<uint32_t>(compute_capability);
      auto better = [&](uint32_t arch, uint32_t than) {
        if ((arch <= cc) != (than <= cc)) return arch <= cc;
        return arch <= cc ? arch > than : arch < than;
      };
      if (!best || better(entry.arch, best->header.arch)) {
        best = Candidate{entry, at + entry.header_bytes};
      }
    }
    const uint64_t step = entry.header_bytes + entry.payload_bytes;
    at += step;
    left -= step;
  }
  return best;
}

bool Unpack(const Candidate& candidate, std::string* text) {
  const EntryHeader& h = candidate.header;
  const char* const payload = reinterpret_cast<const char*>(candidate.payload);
  if (h.compressed_bytes == 0) {
    text->assign(payload, h.payload_bytes);
  } else {
    if (h.compressed_bytes > h.payload_bytes || h.uncompressed_bytes > kLargestPtx ||
        h.uncompressed_bytes / kLargestRatio > h.compressed_bytes) {
      return false;
    }
    text->resize(h.uncompressed_bytes);
    if ((h.flags & kFlagZstd) != 0) {
      const size_t done = ZSTD_decompress(text->data(), text->size(), payload, h.compressed_bytes);
      if (ZSTD_isError(done) || done != text->size()) return false;
    } else if ((h.flags & kFlagLz4) != 0) {
      const int done =
          LZ4_decompress_safe(payload, text->data(), static_cast<int>(h.compressed_bytes),
                              static_cast<int>(text->size()));
      if (done < 0 || static_cast<size_t>(done) != text->size()) return false;
    } else {
      return false;
    }
  }
  const size_t end = text->find('\0');
  if (end != std::string::npos) text->resize(end);
  return true;
}

CUresult AddContainer(const void* container, int compute_capability,
                      std::vector<std::string>* texts, std::string* log) {
  bool broken = false;
  const std::optional<Candidate> chosen = Choose(container, compute_capability, &broken);
  if (broken) {
    *log = "The fat binary is damaged.";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (!chosen) return CUDA_SUCCESS;
  std::string text;
  if (!Unpack(*chosen, &text)) {
    *log = "The PTX in the fat binary cannot be decompressed.";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (static_cast<int>(chosen->header.arch) > compute_capability && !IsDeviceRuntime(text)) {
    LogWarning(
        "The oldest PTX of a fat binary is for compute capability (%u.%u), newer than this "
        "device's (%d.%d): it is used all the same.",
        chosen->header.arch / 10, chosen->header.arch % 10, compute_capability / 10,
        compute_capability % 10);
  }
  texts->push_back(std::move(text));
  return CUDA_SUCCESS;
}

constexpr char kOnlyMachineCode[] =
    "The image has machine code only and no PTX; a simulated GPU runs PTX. Compile with "
    "-gencode arch=compute_XX,code=compute_XX, or with plain -arch=sm_XX, which adds PTX.";

bool LooksLikePtx(const char* text) {
  while (*text == ' ' || *text == '\t' || *text == '\n' || *text == '\r') ++text;
  return *text == '.' || *text == '/';
}

}  // namespace

CUresult PtxOfImage(const void* image, int compute_capability, std::string* ptx, std::string* log) {
  std::vector<std::string> texts;
  const char* const bytes = static_cast<const char*>(image);
  if (LooksLikePtx(bytes)) {
    *ptx = bytes;
    return CUDA_SUCCESS;
  }
  const uint32_t magic = bytes[0] == '\0' ? 0 : FirstWord(image);
  if (magic == kElfMagic) {
    *log = kOnlyMachineCode;
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  if (magic == kContainerMagic) {
    const CUresult result = AddContainer(image, compute_capability, &texts, log);
    if (result != CUDA_SUCCESS) return result;
  } else if (magic == kWrapperMagic) {
    Wrapper wrapper;
    std::memcpy(&wrapper, image, sizeof(wrapper));
    const bool linked = wrapper.version == 2 && wrapper.filename_or_fatbins != nullptr;
    if (linked) {
      for (auto* element = static_cast<const void* const*>(wrapper.filename_or_fatbins);
           *element != nullptr; ++element) {
        const CUresult result = AddContainer(*element, compute_capability, &texts, log);
        if (result != CUDA_SUCCESS) return result;
      }
    }
    if (texts.empty() && wrapper.data != nullptr) {
      if (FirstWord(wrapper.data) == kElfMagic) {
        *log = kOnlyMachineCode;
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
      }
      const CUresult result = AddContainer(wrapper.data, compute_capability, &texts, log);
      if (result != CUDA_SUCCESS) return result;
    }
  } else {
    *log = "The image is neither PTX text nor a fat binary.";
    return CUDA_ERROR_INVALID_IMAGE;
  }
  if (texts.empty()) {
    *log = kOnlyMachineCode;
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  return LinkPtx(texts, ptx, log) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

bool ReadFile(const char* path, std::string* contents) {
  FILE* const file = std::fopen(path, "rb");
  if (file == nullptr) return false;
  char buffer[1 << 14];
  while (const size_t bytes = std::fread(buffer, 1, sizeof buffer, file)) {
    contents->append(buffer, bytes);
  }
  const bool whole = std::ferror(file) == 0;
  std::fclose(file);
  return whole;
}

}  // namespace simgpu
