#include "simgpu/driver/ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace simgpu {

// All zero is an empty ledger, so a new file needs no preparation but its size. By device first:
// adding up reads neighbours.
struct MemoryLedger::Accounts {
  std::atomic<uint64_t> layout;
  uint64_t reserved[7];
  std::atomic<uint64_t> used[kDevices][kSlots];
};

namespace {

constexpr uint64_t kLayout = 0x3167646c'75706773;  // "sgpuldg1"
constexpr off_t kAccountsByte = 0;
constexpr off_t kFirstSlotByte = 1;

int Lock(int fd, int command, short type, off_t byte) {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  int result;
  do {
    result = fcntl(fd, command, &lock);
  } while (result != 0 && errno == EINTR);
  return result;
}

class AccountsLock {
 public:
  explicit AccountsLock(int fd) : fd_(fd) { Lock(fd_, F_SETLKW, F_WRLCK, kAccountsByte); }
  ~AccountsLock() { Lock(fd_, F_SETLK, F_UNLCK, kAccountsByte); }

 private:
  const int fd_;
};

// The existing file first: in a folder such as /dev/shm, opening somebody else's file with O_CREAT
// may be forbidden.
int OpenOrCreate(const std::string& path) {
  while (true) {
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd >= 0 || errno != ENOENT) return fd;
    fd = open(path.c_str(), O_RDWR | O_CLOEXEC | O_CREAT | O_EXCL, 0666);
    if (fd >= 0) fchmod(fd, 0666);  // whatever the umask
    if (fd >= 0 || errno != EEXIST) return fd;
  }
}

}  // namespace

std::unique_ptr<MemoryLedger> MemoryLedger::Open(const std::string& name, std::string* error) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const std::string path = name.find('/') == std::string::npos ? "/dev/shm/simgpu-" + name : name;
  const int fd = OpenOrCreate(path);
  if (fd < 0) {
    *error = "Ledger (" + path + ") cannot be opened: " + std::strerror(errno) + ".";
    return nullptr;
  }
  struct stat status = {};
  const bool known = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                     (status.st_size == 0 || status.st_size == sizeof(Accounts));
  if (!known) {
    *error = "File (" + path + ") is no ledger of this version of simgpu.";
    close(fd);
    return nullptr;
  }
  void* mapped = MAP_FAILED;
  if (ftruncate(fd, sizeof(Accounts)) == 0) {
    mapped = mmap(nullptr, sizeof(Accounts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  if (mapped == MAP_FAILED) {
    *error = "Ledger (" + path + ") cannot be mapped: " + std::strerror(errno) + ".";
    close(fd);
    return nullptr;
  }
  auto* accounts = static_cast<Accounts*>(mapped);
  std::unique_ptr<MemoryLedger> ledger(new MemoryLedger(fd, accounts));
  uint64_t layout = 0;
  if (!accounts->layout.compare_exchange_strong(layout, kLayout) && layout != kLayout) {
    *error = "File (" + path + ") is no ledger of this version of simgpu.";
    return nullptr;
  }
  if (!ledger->TakeSlot()) {
    *error = "Ledger (" + path + ") has no place for another process (" + std::to_string(kSlots) +
             " hold theirs).";
    return nullptr;
  }
  return ledger;
}

MemoryLedger::~MemoryLedger() {
  if (slot_ >= 0) ClearWords(slot_);
  munmap(accounts_, sizeof(Accounts));
  close(fd_);  // and with it goes the slot
}

bool MemoryLedger::TakeSlot() {
  const AccountsLock lock(fd_);
  for (int slot = 0; slot < kSlots; ++slot) {
    if (Lock(fd_, F_SETLK, F_WRLCK, kFirstSlotByte + slot) != 0) continue;
    ClearWords(slot);  // of an owner that died with them
    slot_ = slot;
    return true;
  }
  return false;
}

void MemoryLedger::ClearWords(int slot) const {
  for (auto& device : accounts_->used) device[slot].store(0, std::memory_order_relaxed);
}

bool MemoryLedger::Alive(int slot) const {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kFirstSlotByte + slot;
  lock.l_len = 1;
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

size_t MemoryLedger::AddUp(int device, bool clear_dead) const {
  size_t sum = 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    const size_t used = accounts_->used[device][slot].load(std::memory_order_relaxed);
    if (used == 0) continue;
    if (slot != slot_ && !Alive(slot)) {
      if (clear_dead) ClearWords(slot);
      continue;
    }
    // Another process's word is whatever it wrote.
    if (__builtin_add_overflow(sum, used, &sum)) return SIZE_MAX;
  }
  return sum;
}

size_t MemoryLedger::Used(int device) const {
  return AddUp(device, /*clear_dead=*/false);
}

bool MemoryLedger::Charge(int device, size_t bytes, size_t limit) {
  std::lock_guard guard(mutex_);
  const AccountsLock lock(fd_);
  // Nobody can take a slot meanwhile, so one that is dead stays so while it is cleared.
  const size_t used = AddUp(device, /*clear_dead=*/true);
  if (used > limit || bytes > limit - used) return false;
  accounts_->used[device][slot_].fetch_add(bytes, std::memory_order_relaxed);
  return true;
}

void MemoryLedger::Refund(int device, size_t bytes) {
  accounts_->used[device][slot_].fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace simgpu
