#!/usr/bin/env python3
"""What a call costs on the wire, by difference: N and 2N calls of a kind in two runs of one program,
so that starting, ending and loading cancel out. Exact on any machine."""

from harness import *

N = 200
SYNCS = 2 * N // 50  # what N calls more bring of the program's own synchronisations
POSTED = ["launch", "memset", "memset_sync", "event_record", "stream_wait", "small_upload",
          "small_upload_async", "device_copy", "create_destroy", "questions", "nothing_copied"]
MEGABYTE = 1 << 20


def _stats(daemon, kind, count):
    with Scratch() as scratch:
        check_ok(run([program("call_counts"), kind, str(count)],
                     client_env(daemon, PENSTOCK_STATS=scratch / "stats")), kind)
        return Stats(scratch / "stats")


def _difference(daemon, kind, count=N):
    few, many = _stats(daemon, kind, count), _stats(daemon, kind, 2 * count)
    names = ("round_trips", "posted", "local", "frames_sent", "bytes_sent", "bytes_received",
             "bulk_copies")
    return {name: many[name] - few[name] for name in names}


@case
def posted():
    """No round trip for what needs no answer; no frame at all for nothing."""
    with Daemon() as daemon:
        nothing = _difference(daemon, "sync")
        check_equal(nothing["round_trips"], SYNCS, "The round trips of the synchronisations alone")
        for kind in POSTED:
            more = _difference(daemon, kind)
            print(f"{kind:20} {more}")
            check_equal(more["round_trips"], SYNCS, f"Round trips, with {N} times {kind},")
            if kind in ("nothing_copied", "questions"):
                check_equal(more["posted"], 0, f"Posted calls, with {N} times {kind},")
                check(abs(more["bytes_sent"] - nothing["bytes_sent"]) < N,
                      f"{N} times {kind} sends ({more['bytes_sent']}) bytes.")
            else:
                check(more["posted"] >= N, f"Only ({more['posted']}) of {N} {kind} are posted.")


@case
def copies():
    """Bytes that the client's CPU copies per byte moved: none from or to pinned memory, at most one
    for pageable memory."""
    count = 20
    payload = count * MEGABYTE
    with Daemon() as daemon:
        for kind, most in (("upload_pinned", 0), ("download_pinned", 0), ("upload_pageable", 1),
                           ("download_pageable", 1)):
            more = _difference(daemon, kind, count)
            print(f"{kind:20} {more}")
            check(more["bulk_copies"] <= most * payload,
                  f"{kind} copies ({more['bulk_copies'] / payload:.2f}) bytes per byte.")
            way = "bytes_sent" if kind.startswith("upload") else "bytes_received"
            check(payload <= more[way] < payload * 1.02 + 20_000,
                  f"{kind} of ({payload}) bytes moves ({more[way]}).")


main()
