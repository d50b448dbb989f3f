#include "interposer/cuda/image.h"

#include <elf.h>
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <string>

using namespace penstock;
using namespace penstock::interposer;

namespace {

// Memory that ends at a page which cannot be read, so that a byte too many is a fault.
class EdgeOfMemory {
 public:
  explicit EdgeOfMemory(const void* data, size_t bytes) {
    pages_ = (bytes + 4095) / 4096 * 4096;
    map_ = static_cast<std::byte*>(
        mmap(nullptr, pages_ + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(map_ != MAP_FAILED);
    REQUIRE(mprotect(map_ + pages_, 4096, PROT_NONE) == 0);
    start_ = map_ + pages_ - bytes;
    memcpy(start_, data, bytes);
  }
  ~EdgeOfMemory() { munmap(map_, pages_ + 4096); }
  const void* get() const { return start_; }

 private:
  size_t pages_;
  std::byte *map_, *start_;
};

struct Container {
  uint32_t magic = 0xBA55ED50;
  uint16_t version = 1, header_bytes = 16;
  uint64_t bytes = 24;
  uint8_t payload[24] = {};
};

struct Wrapper {
  uint32_t magic = 0x466243B1, version = 1;
  const void* data = nullptr;
  const void* more = nullptr;
};

}  // namespace

TEST_CASE("PTX is measured to its end and no further", "[interposer][image]") {
  for (const char* text : {".version 8.0", "\n\n// nothing", ".", "ab", "abc"}) {
    const EdgeOfMemory memory(text, strlen(text) + 1);
    const auto image = MeasureImage(memory.get());
    REQUIRE(image.has_value());
    CHECK(image->format == ImageFormat::kPtx);
    REQUIRE(image->parts.size() == 1);
    CHECK(image->parts[0].bytes == strlen(text) + 1);
  }
}

TEST_CASE("what is neither fatbin nor ELF nor text is refused", "[interposer][image]") {
  for (const std::string& bytes : {std::string("\0", 1), std::string("\x01\x02\x03\x04", 4)}) {
    const EdgeOfMemory memory(bytes.data(), bytes.size());
    CHECK_FALSE(MeasureImage(memory.get()).has_value());
  }
}

TEST_CASE("a container says its own size", "[interposer][image]") {
  Container container;
  const EdgeOfMemory memory(&container, sizeof container);
  const auto image = MeasureImage(memory.get());
  REQUIRE(image.has_value());
  CHECK(image->format == ImageFormat::kContainer);
  CHECK(image->parts[0].bytes == 40);

  SECTION("and an impossible one is refused") {
    container.bytes = UINT64_MAX - 8;
    CHECK_FALSE(MeasureImage(&container).has_value());
    container.bytes = 24;
    container.header_bytes = 64;
    CHECK_FALSE(MeasureImage(&container).has_value());
  }
}

TEST_CASE("a wrapper leads to its containers", "[interposer][image]") {
  const Container linked, first, second;
  Wrapper wrapper;
  wrapper.data = &linked;
  SECTION("one, in version 1, whatever the last word is") {
    wrapper.more = reinterpret_cast<const void*>(0x1234);
    const EdgeOfMemory memory(&wrapper, sizeof wrapper);
    const auto image = MeasureImage(memory.get());
    REQUIRE(image.has_value());
    CHECK(image->format == ImageFormat::kWrapper);
    CHECK(image->parts.size() == 1);
  }
  SECTION("and those of the units, in version 2") {
    const void* const units[] = {&first, &second, nullptr};
    const EdgeOfMemory list(units, sizeof units);
    wrapper.version = 2;
    wrapper.more = list.get();
    const auto image = MeasureImage(&wrapper);
    REQUIRE(image.has_value());
    CHECK(image->format == ImageFormat::kWrapperV2);
    REQUIRE(image->parts.size() == 3);
    CHECK(image->parts[0].data == &linked);
    CHECK(image->parts[2].data == &second);
  }
  SECTION("a list without an end is refused at the limit") {
    std::vector<const void*> units(kMaxModuleParts + 8, &first);
    wrapper.version = 2;
    wrapper.more = units.data();
    CHECK_FALSE(MeasureImage(&wrapper).has_value());
  }
  SECTION("an unknown version is refused, not followed") {
    wrapper.version = 3;
    wrapper.data = reinterpret_cast<const void*>(0x10);
    CHECK_FALSE(MeasureImage(&wrapper).has_value());
  }
  SECTION("a container that is none is refused") {
    const uint32_t nonsense[4] = {1, 2, 3, 4};
    const EdgeOfMemory memory(nonsense, sizeof(uint32_t));
    wrapper.data = memory.get();
    CHECK_FALSE(MeasureImage(&wrapper).has_value());
    wrapper.data = nullptr;
    CHECK_FALSE(MeasureImage(&wrapper).has_value());
  }
}

TEST_CASE("an ELF image ends where its last part ends", "[interposer][image]") {
  struct {
    Elf64_Ehdr header{};
    Elf64_Shdr sections[3]{};
    uint8_t code[100]{};
  } elf;
  memcpy(elf.header.e_ident, ELFMAG, SELFMAG);
  elf.header.e_ident[EI_CLASS] = ELFCLASS64;
  elf.header.e_ident[EI_DATA] = ELFDATA2LSB;
  elf.header.e_shoff = offsetof(decltype(elf), sections);
  elf.header.e_shnum = 3;
  elf.header.e_shentsize = sizeof(Elf64_Shdr);
  elf.sections[1].sh_type = SHT_PROGBITS;
  elf.sections[1].sh_offset = offsetof(decltype(elf), code);
  elf.sections[1].sh_size = sizeof elf.code;
  elf.sections[2].sh_type = SHT_NOBITS;  // takes no room in the file
  elf.sections[2].sh_offset = offsetof(decltype(elf), code);
  elf.sections[2].sh_size = 1 << 20;
  const size_t whole = offsetof(decltype(elf), code) + sizeof elf.code;
  const EdgeOfMemory memory(&elf, whole);
  const auto image = MeasureImage(memory.get());
  REQUIRE(image.has_value());
  CHECK(image->format == ImageFormat::kElf);
  CHECK(image->parts[0].bytes == whole);

  SECTION("impossible tables and sections are refused") {
    elf.sections[1].sh_size = UINT64_MAX;
    CHECK_FALSE(MeasureImage(&elf).has_value());
    elf.sections[1].sh_size = 1;
    elf.sections[1].sh_offset = UINT64_MAX - 2;
    CHECK_FALSE(MeasureImage(&elf).has_value());
    elf.sections[1].sh_offset = 0;
    elf.header.e_shentsize = 8;
    CHECK_FALSE(MeasureImage(&elf).has_value());
    elf.header.e_shentsize = sizeof(Elf64_Shdr);
    elf.header.e_shoff = UINT64_MAX - 64;
    CHECK_FALSE(MeasureImage(&elf).has_value());
    elf.header.e_shoff = 0;
    elf.header.e_ident[EI_CLASS] = ELFCLASS32;
    CHECK_FALSE(MeasureImage(&elf).has_value());
  }
}
