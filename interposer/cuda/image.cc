// Kinds, told by the first bytes:
//
//   0x466243B1  the wrapper that nvcc puts into a program (fatbinary_section.h of the toolkit):
//               version 1 points to one container, version 2 (-rdc=true) to the linked container
//               and to a list of those of the translation units, which ends with a null
//   0xBA55ED50  a container (fatbinary.h): a header with the size of what follows
//   7F 'E' 'L' 'F'  a cubin; its length is where the last of its tables and sections ends
//   else        PTX text, which ends with a NUL
#include "interposer/cuda/image.h"

#include <elf.h>

#include <cctype>
#include <cstring>
#include <string>

namespace penstock::interposer {
namespace {

constexpr uint32_t kWrapperMagic = 0x466243B1;
constexpr uint32_t kContainerMagic = 0xBA55ED50;
constexpr uint64_t kContainerHeaderBytes = 16;

struct Wrapper {
  uint32_t magic, version;
  const void* data;
  const void* more;
};
static_assert(sizeof(Wrapper) == 24);

struct ContainerHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // after the header
};
static_assert(sizeof(ContainerHeader) == kContainerHeaderBytes);

template <typename T>
T ReadAs(const void* place) {
  T value;
  memcpy(&value, place, sizeof value);
  return value;
}

auto Malformed(const std::string& what) {
  return Fail(Code::kInvalidArgument, what);
}

Result<ImagePart> MeasureContainer(const void* data) {
  if (data == nullptr) return Malformed("A fatbin wrapper points nowhere.");
  const uint32_t magic = ReadAs<uint32_t>(data);
  if (magic != kContainerMagic) {
    return Malformed("A fatbin container starts with an unknown word (" + std::to_string(magic) +
                     ").");
  }
  const auto header = ReadAs<ContainerHeader>(data);
  if (header.header_bytes != kContainerHeaderBytes) {
    return Malformed("A fatbin container has an unknown header size (" +
                     std::to_string(header.header_bytes) + ").");
  }
  if (header.bytes > kMaxModuleBytes - kContainerHeaderBytes) {
    return Malformed("A fatbin container is too large (" + std::to_string(header.bytes) + ").");
  }
  return ImagePart{data, kContainerHeaderBytes + header.bytes};
}

Result<Image> MeasureWrapper(const void* image) {
  const auto wrapper = ReadAs<Wrapper>(image);
  if (wrapper.version != 1 && wrapper.version != 2) {
    return Malformed("A fatbin wrapper has an unknown version (" + std::to_string(wrapper.version) +
                     ").");
  }
  Image result;
  ASSIGN_OR_RETURN(const ImagePart linked, MeasureContainer(wrapper.data));
  result.parts.push_back(linked);
  result.format = ImageFormat::kWrapper;
  if (wrapper.version == 1 || wrapper.more == nullptr) return result;
  result.format = ImageFormat::kWrapperV2;
  const void* const* units = static_cast<const void* const*>(wrapper.more);
  for (; *units != nullptr; ++units) {
    if (result.parts.size() == kMaxModuleParts) {
      return Malformed("A fatbin wrapper lists more translation units than the limit (" +
                       std::to_string(kMaxModuleParts) + ").");
    }
    ASSIGN_OR_RETURN(const ImagePart unit, MeasureContainer(*units));
    result.parts.push_back(unit);
  }
  return result;
}

// Where a table of so many entries ends; false if that lies beyond any module.
bool TableEnd(uint64_t offset, uint64_t count, uint64_t entry_bytes, uint64_t* end) {
  if (offset > kMaxModuleBytes || count * entry_bytes > kMaxModuleBytes) return false;
  *end = std::max(*end, offset + count * entry_bytes);
  return *end <= kMaxModuleBytes;
}

Result<Image> MeasureElf(const void* image) {
  const auto header = ReadAs<Elf64_Ehdr>(image);
  if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_ident[EI_DATA] != ELFDATA2LSB) {
    return Malformed("An ELF image is not of the 64-bit little-endian kind.");
  }
  uint64_t end = sizeof header;
  if ((header.e_shnum != 0 && header.e_shentsize != sizeof(Elf64_Shdr)) ||
      (header.e_phnum != 0 && header.e_phentsize != sizeof(Elf64_Phdr)) ||
      !TableEnd(header.e_shoff, header.e_shnum, header.e_shentsize, &end) ||
      !TableEnd(header.e_phoff, header.e_phnum, header.e_phentsize, &end)) {
    return Malformed("An ELF image has impossible tables.");
  }
  for (uint32_t i = 0; i < header.e_shnum; ++i) {
    const auto section = ReadAs<Elf64_Shdr>(static_cast<const char*>(image) + header.e_shoff +
                                            i * sizeof(Elf64_Shdr));
    if (section.sh_type == SHT_NOBITS) continue;
    if (!TableEnd(section.sh_offset, 1, std::min(section.sh_size, kMaxModuleBytes + 1), &end)) {
      return Malformed("An ELF image has an impossible section.");
    }
  }
  return Image{ImageFormat::kElf, {{image, end}}};
}

Result<Image> MeasureText(const void* image) {
  const char* const text = static_cast<const char*>(image);
  const unsigned char first = static_cast<unsigned char>(*text);
  if (!isprint(first) && !isspace(first)) {
    return Malformed("An image is none of: fatbin, ELF, PTX.");
  }
  const size_t length = strnlen(text, kMaxModuleBytes);
  if (length == kMaxModuleBytes) return Malformed("A PTX text has no end.");
  return Image{ImageFormat::kPtx, {{image, length + 1}}};
}

}  // namespace

Result<Image> MeasureImage(const void* image) {
  // A short text may end before four bytes.
  const unsigned char* const bytes = static_cast<const unsigned char*>(image);
  const bool four = bytes[0] != 0 && bytes[1] != 0 && bytes[2] != 0;
  if (four) {
    const uint32_t magic = ReadAs<uint32_t>(image);
    if (magic == kWrapperMagic) return MeasureWrapper(image);
    if (magic == kContainerMagic) {
      ASSIGN_OR_RETURN(const ImagePart part, MeasureContainer(image));
      return Image{ImageFormat::kContainer, {part}};
    }
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0) return MeasureElf(image);
  }
  return MeasureText(image);
}

}  // namespace penstock::interposer
