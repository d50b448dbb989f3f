#!/usr/bin/env python3
"""PENSTOCK_STATS: what costs a round trip, and what must not. Exact on any machine."""

from harness import *

MOST_ROUND_TRIPS_OF_VECTOR_ADD = 12
POSTED = ["cuLaunchKernel", "cuMemsetD32Async", "cuMemsetD8", "cuEventRecord", "cuStreamWaitEvent",
          "cuMemcpyHtoD"]


def _stats(daemon, command):
    with Scratch() as scratch:
        outcome = run(command, client_env(daemon, PENSTOCK_STATS=scratch / "stats"))
        check_ok(outcome, command[0])
        return outcome, Stats(scratch / "stats")


@case
def vector_add():
    with Daemon() as daemon:
        _, stats = _stats(daemon, [sample("static", "vector_add")])
        print(json.dumps(stats.data, indent=1))
        check(0 < stats["round_trips"] <= MOST_ROUND_TRIPS_OF_VECTOR_ADD,
              f"vector_add takes ({stats['round_trips']}) round trips.")
        # Two arrays of 1,000,003 floats go over, one comes back; the rest is small.
        array = 4 * 1_000_003
        for direction, arrays in (("sent", 2), ("received", 1)):
            carried = stats[f"bytes_{direction}"]  # all of them, bulk data included
            check(arrays * array <= carried < arrays * array + 100_000,
                  f"({carried}) bytes are {direction} for ({arrays}) arrays of ({array}).")
        rows = stats["functions"].values()
        check(sum(row["round_trips"] for row in rows) <= stats["round_trips"],
              "The functions' round trips add up to more than the total.")


@case
def posted_calls():
    with Daemon() as daemon:
        outcome, stats = _stats(daemon, [program("posting")])
        check_equal(outcome.out, "104 104 63636363 99\n", "What the program computes")
        for name in POSTED:
            check_equal(stats.function(name), (100, 0), f"(calls, round trips) of {name}")
        for name in ("frames_sent", "frames_received", "bytes_sent", "bytes_received", "posted",
                     "local", "bulk_copies"):
            check(isinstance(stats[name], int) and stats[name] >= 0, f"{name} is no count.")
        check(stats["posted"] >= 600, f"Only ({stats['posted']}) calls are posted.")


main()
