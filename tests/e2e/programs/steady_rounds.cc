// Rounds of work for a while, each verified: the undisturbed neighbour in tests of isolation.
//
// steady_rounds [ROUNDS] [READY_FILE]: the file appears when the first round is done.
#include "tests/e2e/programs/rounds.h"

int main(int argc, char** argv) {
  StartWatchdog();
  const int count = argc > 1 ? atoi(argv[1]) : 20;
  Gpu gpu;
  Rounds rounds(gpu.kernels);
  for (int round = 0; round < count; ++round) {
    rounds.Run(1, round);
    if (round == 0 && argc > 2) {
      FILE* ready = fopen(argv[2], "w");
      if (ready != nullptr) fclose(ready);
    }
  }
  rounds.Finish();
  printf("steady_rounds: %d rounds, ok\n", count);
}
