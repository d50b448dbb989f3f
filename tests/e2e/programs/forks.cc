// Processes that fork after cuInit. A child that calls no CUDA is undisturbed, as is its parent,
// also while kernels run and however the child ends; a child that does call CUDA gets a clean error
// or works, but neither hangs nor crashes nor disturbs its parent.
//
// forks quiet|calls|exec
#include <sys/wait.h>

#include "tests/e2e/programs/rounds.h"

namespace {

int WaitForChild(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) Fail("The child cannot be waited for.");
  EXPECT(WIFEXITED(status), "The child ends by signal (%d).", WTERMSIG(status));
  return WEXITSTATUS(status);
}

}  // namespace

int main(int argc, char** argv) {
  StartWatchdog();
  const char* kind = argc > 1 ? argv[1] : "quiet";
  Gpu gpu;
  Rounds rounds(gpu.kernels);
  rounds.Run(3, 0);
  std::atomic<bool> done = false;
  int more = 0;
  std::thread worker([&] {  // another thread is in the middle of things when the fork happens
    gpu.MakeCurrent();
    Rounds own(gpu.kernels);
    while (!done || more == 0) own.Run(1, more++);
    own.Finish();
  });
  for (int i = 0; i < 5; ++i) {
    fflush(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      if (strcmp(kind, "exec") == 0) {
        execl("/bin/sh", "sh", "-c", "exit 7", nullptr);
        _exit(99);
      }
      if (strcmp(kind, "calls") == 0) {
        CUdeviceptr memory = 0;
        int value = 5, back = 0;
        CUresult result = cuMemAlloc(&memory, 64);
        if (result == CUDA_SUCCESS) {
          result = cuMemcpyHtoD(memory, &value, sizeof value);
          if (result == CUDA_SUCCESS) result = cuMemcpyDtoH(&back, memory, sizeof back);
          if (result == CUDA_SUCCESS && back != value) _exit(98);  // a wrong value
        }
        cuCtxSynchronize();
        cuMemFree(memory);
        int count = 0;
        cuDeviceGetCount(&count);
        _exit(7);
      }
      // No CUDA: ordinary work, with allocation, and an ordinary end with exit handlers.
      std::vector<int> numbers(100'000, 1);
      int sum = 0;
      for (const int number : numbers) sum += number;
      if (sum != 100'000) _exit(97);
      if (i % 2 == 0) _exit(7);
      exit(7);
    }
    EXPECT(child > 0, "The fork fails.");
    rounds.Run(2, 10 * i);
    const int status = WaitForChild(child);
    EXPECT(status == 7, "The child ends with status (%d) instead of (7).", status);
    rounds.Run(2, 10 * i + 5);
  }
  done = true;
  worker.join();
  rounds.Finish();
  printf("forks %s: 5 children, ok\n", kind);
  return 0;
}
