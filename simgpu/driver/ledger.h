// The memory of devices that several processes share.
//
// A real device's memory is one for all programs of a machine, and what a program held is free the
// moment it is dead, however it died. Device memory here belongs to its process anyway; what is
// shared is the accounts. SIMGPU_SHARED names a file (in /dev/shm unless it has a slash) that every
// process with the same name maps: for each device, one word per process with the bytes it holds.
//
// A process's words count as long as it holds a file lock on its slot's byte, and the kernel drops
// that lock when the process ends. Nobody has to clean up, and a file that is left over is an empty
// one. The locks are those of POSIX, which belong to the process, and not those of an open file,
// which a forked child would go on holding. Their known trap is that closing any descriptor of the
// file drops them; this library never closes one, and a descriptor that was passed in must stay
// open likewise.
//
//   word of a slot      written by its owner alone, and zeroed by whoever finds the owner dead
//   lock on byte 0      held to add up the words and change one of them, so that two processes
//                       cannot both take the last bytes
//   lock on byte 1 + n  slot n has an owner
//
// Price: two system calls per allocation, one more for each other process that holds memory.
// The file is open to all users, as a GPU's device file is; who may write it can misstate the
// accounts, and nothing else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace simgpu {

class MemoryLedger {
 public:
  static constexpr int kDevices = 64;
  static constexpr int kSlots = 512;  // processes at one time

  // Takes a slot. Null, with a sentence, if there is no such file to be had or no slot.
  static std::unique_ptr<MemoryLedger> Open(const std::string& name, std::string* error);
  ~MemoryLedger();
  MemoryLedger(const MemoryLedger&) = delete;

  // Takes bytes for this process; false if all processes would then hold more than the limit.
  bool Charge(int device, size_t bytes, size_t limit);
  void Refund(int device, size_t bytes);
  // What all living processes hold.
  size_t Used(int device) const;

 private:
  struct Accounts;

  MemoryLedger(int fd, Accounts* accounts) : fd_(fd), accounts_(accounts) {}
  bool TakeSlot();
  bool Alive(int slot) const;
  size_t AddUp(int device, bool clear_dead) const;
  void ClearWords(int slot) const;

  const int fd_;
  Accounts* const accounts_;
  int slot_ = -1;
  std::mutex mutex_;  // for this process's threads what the lock on byte 0 is between processes
};

}  // namespace simgpu
