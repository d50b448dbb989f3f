// Functions of newer C libraries that our static libraries would otherwise ask the system's for.
//
// What we ship must load wherever it is copied to, so it needs no symbol newer than glibc 2.34. But
// libgcc's unwinder (linked statically) wants _dl_find_object (2.35), and libstdc++ and libsodium
// arc4random (2.36). Both are given here, hidden, with what every glibc has. Linked into each
// program and library of the tarball: target penstock_old_glibc.
#include <errno.h>
#include <link.h>
#include <sys/random.h>

#include <cstdint>
#include <cstdlib>

namespace {

// As <dlfcn.h> of glibc 2.35 lays it out on x86-64.
struct FoundObject {
  unsigned long long flags;
  void* map_start;
  void* map_end;
  link_map* map;
  void* eh_frame;
  unsigned long long reserved[7];
};

struct Search {
  uintptr_t address;
  FoundObject* result;
};

int Look(dl_phdr_info* info, size_t, void* data) {
  Search* const search = static_cast<Search*>(data);
  uintptr_t start = UINTPTR_MAX, end = 0;
  const ElfW(Phdr)* eh_frame = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& header = info->dlpi_phdr[i];
    if (header.p_type == PT_GNU_EH_FRAME) eh_frame = &header;
    if (header.p_type != PT_LOAD) continue;
    const uintptr_t first = info->dlpi_addr + header.p_vaddr;
    if (first < start) start = first;
    if (first + header.p_memsz > end) end = first + header.p_memsz;
  }
  if (search->address < start || search->address >= end || eh_frame == nullptr) return 0;
  *search->result = FoundObject{};
  search->result->map_start = reinterpret_cast<void*>(start);
  search->result->map_end = reinterpret_cast<void*>(end);
  search->result->eh_frame = reinterpret_cast<void*>(info->dlpi_addr + eh_frame->p_vaddr);
  return 1;
}

void FillRandomOrAbort(void* buffer, size_t bytes) {
  auto* place = static_cast<unsigned char*>(buffer);
  while (bytes > 0) {
    const ssize_t got = getrandom(place, bytes, 0);
    if (got <= 0) {
      if (errno == EINTR) continue;
      abort();  // as arc4random does: there is no way to go on without randomness
    }
    place += got;
    bytes -= static_cast<size_t>(got);
  }
}

}  // namespace

extern "C" {

// Under another name in C++, as a newer <dlfcn.h> declares it with its own type.
__attribute__((visibility("hidden"))) int FindObject(void* address, FoundObject* result) __asm__(
    "_dl_find_object");
int FindObject(void* address, FoundObject* result) {
  Search search{reinterpret_cast<uintptr_t>(address), result};
  return dl_iterate_phdr(&Look, &search) == 1 ? 0 : -1;
}

__attribute__((visibility("hidden"))) void arc4random_buf(void* buffer, size_t bytes) {
  FillRandomOrAbort(buffer, bytes);
}

__attribute__((visibility("hidden"))) uint32_t arc4random(void) {
  uint32_t value;
  FillRandomOrAbort(&value, sizeof value);
  return value;
}

__attribute__((visibility("hidden"))) uint32_t arc4random_uniform(uint32_t bound) {
  if (bound < 2) return 0;
  const uint32_t reject_below = -bound % bound;
  uint32_t value;
  do {
    FillRandomOrAbort(&value, sizeof value);
  } while (value < reject_below);
  return value % bound;
}

}  // extern "C"
