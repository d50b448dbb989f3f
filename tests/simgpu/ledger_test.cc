// Real processes, because what is tested is what one process learns of another, dead ones included.
#include "simgpu/driver/ledger.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

using simgpu::MemoryLedger;

namespace {

constexpr size_t kLimit = 1000;

// A file of its own for each test, gone with it.
class LedgerFile {
 public:
  LedgerFile() {
    char path[] = "/tmp/simgpu-ledger-XXXXXX";
    const int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    close(fd);
    path_ = path;
  }
  ~LedgerFile() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }
  std::unique_ptr<MemoryLedger> Open() const {
    std::string error;
    auto ledger = MemoryLedger::Open(path_, &error);
    INFO(error);
    REQUIRE(ledger != nullptr);
    return ledger;
  }

 private:
  std::string path_;
};

// Another process that does `work`, says whether it went well, and lives until it is killed.
class OtherProcess {
 public:
  explicit OtherProcess(const std::function<bool()>& work) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      const char went_well = work() ? 'y' : 'n';
      if (write(ends[1], &went_well, 1) != 1) _exit(1);
      while (true) pause();
    }
    close(ends[1]);
    char answer = '?';
    REQUIRE(read(ends[0], &answer, 1) == 1);
    close(ends[0]);
    CHECK(answer == 'y');
  }
  ~OtherProcess() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    CHECK(waitpid(std::exchange(pid_, -1), nullptr, 0) > 0);
  }

 private:
  pid_t pid_ = -1;
};

// Never destroyed: its process is killed.
bool ChargeInThisProcess(const std::string& path, int device, size_t bytes) {
  std::string error;
  auto* ledger = MemoryLedger::Open(path, &error).release();
  return ledger != nullptr && ledger->Charge(device, bytes, kLimit);
}

}  // namespace

TEST_CASE("what one process charges is used for all, on that device only", "[simgpu][ledger]") {
  const LedgerFile file;
  const auto ledger = file.Open();
  OtherProcess other([&] { return ChargeInThisProcess(file.path(), 1, 700); });
  CHECK(ledger->Used(1) == 700);
  CHECK(ledger->Used(0) == 0);
  CHECK_FALSE(ledger->Charge(1, 301, kLimit));
  CHECK(ledger->Used(1) == 700);
  CHECK(ledger->Charge(1, 300, kLimit));
  CHECK(ledger->Used(1) == 1000);
  CHECK(ledger->Charge(0, 1000, kLimit));
  ledger->Refund(1, 300);
  CHECK(ledger->Used(1) == 700);
}

TEST_CASE("a killed process's memory is free", "[simgpu][ledger]") {
  const LedgerFile file;
  const auto ledger = file.Open();
  OtherProcess first([&] { return ChargeInThisProcess(file.path(), 0, 400); });
  OtherProcess second([&] { return ChargeInThisProcess(file.path(), 0, 500); });
  CHECK(ledger->Used(0) == 900);
  first.Kill();
  CHECK(ledger->Used(0) == 500);
  CHECK(ledger->Charge(0, 500, kLimit));
  CHECK_FALSE(ledger->Charge(0, 1, kLimit));
  second.Kill();
  CHECK(ledger->Charge(0, 500, kLimit));
  CHECK(ledger->Used(0) == 1000);
}

// The next owner of a slot must not inherit what the last one held, on devices it never touches.
TEST_CASE("a slot is empty when it is taken again", "[simgpu][ledger]") {
  const LedgerFile file;
  OtherProcess first([&] { return ChargeInThisProcess(file.path(), 3, 400); });
  first.Kill();
  const auto ledger = file.Open();
  CHECK(ledger->Used(3) == 0);
}

TEST_CASE("a child that outlives its parent does not keep the parent's memory",
          "[simgpu][ledger]") {
  const LedgerFile file;
  const auto ledger = file.Open();
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  OtherProcess parent([&] {
    if (!ChargeInThisProcess(file.path(), 0, 400)) return false;
    const pid_t child = fork();
    if (child == 0) {
      char byte;
      close(ends[1]);
      _exit(read(ends[0], &byte, 1) == 0 ? 0 : 1);  // until the test closes its end
    }
    return child > 0;
  });
  CHECK(ledger->Used(0) == 400);
  parent.Kill();
  CHECK(ledger->Used(0) == 0);
  close(ends[0]);
  close(ends[1]);
}

// Each process takes and returns without pause. Were adding up and taking not one step, two of them
// would at some time both take the last part.
TEST_CASE("processes that race never hold more than there is", "[simgpu][ledger]") {
  constexpr int kRacers = 3;
  constexpr int kRounds = 3000;
  constexpr size_t kPart = 400;  // two parts fit, three do not
  const LedgerFile file;
  struct Shared {
    std::atomic<int> holding, most, refused, taken;
  };
  void* const map =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(map != MAP_FAILED);
  auto* const shared = new (map) Shared{};
  std::vector<pid_t> racers;
  for (int i = 0; i < kRacers; ++i) {
    racers.push_back(fork());
    REQUIRE(racers.back() >= 0);
    if (racers.back() != 0) continue;
    std::string error;
    const auto ledger = MemoryLedger::Open(file.path(), &error);
    if (ledger == nullptr) _exit(1);
    for (int round = 0; round < kRounds; ++round) {
      if (!ledger->Charge(0, kPart, kLimit)) {
        ++shared->refused;
        continue;
      }
      ++shared->taken;
      const int holding = ++shared->holding;
      int most = shared->most;
      while (holding > most && !shared->most.compare_exchange_weak(most, holding)) {
      }
      if (round % 16 == 0) usleep(50);
      --shared->holding;
      ledger->Refund(0, kPart);
    }
    _exit(0);
  }
  for (const pid_t pid : racers) {
    int status = -1;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    CHECK(status == 0);
  }
  CHECK(shared->most <= 2);
  CHECK(shared->taken > 0);
  CHECK(shared->taken + shared->refused == kRacers * kRounds);
  CHECK(file.Open()->Used(0) == 0);
  munmap(map, sizeof(Shared));
}

TEST_CASE("nonsense in another process's words is a full device", "[simgpu][ledger]") {
  const LedgerFile file;
  const auto ledger = file.Open();
  OtherProcess first([&] {
    std::string error;
    auto* theirs = MemoryLedger::Open(file.path(), &error).release();
    theirs->Refund(0, 1);  // below nothing
    return true;
  });
  CHECK_FALSE(ledger->Charge(0, 1, kLimit));
  OtherProcess second([&] {
    std::string error;
    auto* theirs = MemoryLedger::Open(file.path(), &error).release();
    theirs->Refund(0, 1);
    return true;
  });
  CHECK(ledger->Used(0) == SIZE_MAX);
  first.Kill();
  second.Kill();
  CHECK(ledger->Charge(0, 1, kLimit));
}

TEST_CASE("a file that is no ledger is refused and left alone", "[simgpu][ledger]") {
  const LedgerFile file;
  FILE* const written = fopen(file.path().c_str(), "w");
  REQUIRE(written != nullptr);
  fputs("somebody's letter", written);
  fclose(written);
  std::string error;
  CHECK(MemoryLedger::Open(file.path(), &error) == nullptr);
  CHECK(error.find(file.path()) != std::string::npos);
  struct stat status = {};
  REQUIRE(stat(file.path().c_str(), &status) == 0);
  CHECK(status.st_size == 17);
  CHECK(MemoryLedger::Open("/nowhere/at/all", &error) == nullptr);
}
