#!/usr/bin/env python3
"""The rules of order, errors and handles, each by a plain CUDA program (programs/).

direct RULE   the program on simgpu itself: the rule is CUDA's, not ours
remote RULE   through the client library, tcp and the daemon; same status, same output
off RULE      remote, with the mechanism that keeps the rule switched off: the program must fail,
              or else the test shows nothing
"""

from dataclasses import dataclass, field

from harness import *

OFF_LIMIT_S = 20  # for a program that must fail, most of them by not getting any further


@dataclass
class Rule:
    command: list
    off: dict = field(default_factory=dict)  # "daemon" or "client" -> name for PENSTOCK_DISABLE
    fails: bool = False  # the program must fail also with everything switched on


def _rules():
    rules = {}
    for wait in ("stream", "event", "context", "copy"):
        rules[f"thread_waits_{wait}"] = Rule(["thread_waits", wait], {"daemon": "deferred_waits"})
    rules["launch_flood"] = Rule(["launch_flood"], {"client": "window"})
    for kind in ("alloc", "register"):
        for megabytes in (12, 64):
            rules[f"pinned_turnaround_{kind}_{megabytes}"] = Rule(
                ["pinned_turnaround", str(megabytes), kind], {"daemon": "gate"})
    for kind in ("pageable", "alloc", "register", "device", "memset"):
        off = {"daemon": "gate"} if kind in ("alloc", "register") else {}
        rules[f"copy_behind_kernel_{kind}"] = Rule(["copy_behind_kernel", kind], off)
        rules[f"copy_behind_kernel_{kind}_sync"] = Rule(["copy_behind_kernel", kind, "sync"])
    rules["stream_per_thread"] = Rule(["stream_per_thread"])
    rules["stream_legacy"] = Rule(["stream_per_thread", "legacy"], fails=True)
    rules["per_thread_overlap"] = Rule(["per_thread_overlap"])
    rules["legacy_no_overlap"] = Rule(["legacy_no_overlap"], fails=True)
    rules["failing_call"] = Rule(["failing_call"], {"daemon": "thread_errors"})
    rules["host_functions"] = Rule(["host_functions"], {"daemon": "gate"})
    for name in ("context_migration", "bad_handles", "bad_addresses", "small_rules",
                 "before_init", "printf_blocks", "printf_callbacks", "kernel_assert",
                 "device_reset", "memory_numbers", "sync_upload", "release_after_data",
                 "steady_rounds", "volumes", "link", "kernel_kinds", "everyday_mistakes"):
        rules[name] = Rule([name])
    for kind in ("quiet", "calls", "exec"):
        rules[f"forks_{kind}"] = Rule(["forks", kind])
    return rules


RULES = _rules()


def _run(rule, env, limit_s=PROGRAM_LIMIT_S):
    command = [program(rule.command[0]), *rule.command[1:]]
    return run(command, {**env, "PROGRAM_LIMIT_S": str(limit_s)}, limit_s=limit_s + 15)


def _verdict(rule, outcome, where):
    what = f"{' '.join(rule.command)} {where}"
    if rule.fails:
        check_equal(outcome.status, 1, f"The status of {what}")
    else:
        check_ok(outcome, what)
        check(outcome.out.endswith(", ok\n") or outcome.out.endswith(": ok\n"),
              f"{what} says:\n{outcome.out}")


@case
def direct(name):
    outcome = _run(RULES[name], direct_env())
    _verdict(RULES[name], outcome, "on simgpu")


@case
def remote(name):
    rule = RULES[name]
    on_simgpu = _run(rule, direct_env())
    _verdict(rule, on_simgpu, "on simgpu")
    with Daemon() as daemon:
        outcome = _run(rule, client_env(daemon))
        _verdict(rule, outcome, "through tcp")
        for here, there in zip(on_simgpu.out.splitlines(), outcome.out.splitlines()):
            check_equal(there, here, "A line of the output through tcp")
        check_equal(len(outcome.out), len(on_simgpu.out), "The length of the output through tcp")
        print(f"{on_simgpu.seconds:.2f} s on simgpu, {outcome.seconds:.2f} s through tcp")
        again = _run(Rule(["steady_rounds", "2"]), client_env(daemon))
        check_ok(again, "The next program on the same daemon")


@case
def off(name):
    rule = RULES[name]
    check(rule.off, f"Nothing can be switched off for ({name}).")
    daemon_env = {"PENSTOCK_DISABLE": rule.off["daemon"]} if "daemon" in rule.off else {}
    more = {"PENSTOCK_DISABLE": rule.off["client"]} if "client" in rule.off else {}
    with Daemon(**daemon_env) as daemon:
        outcome = _run(rule, client_env(daemon, **more), OFF_LIMIT_S)
        print(outcome.err, end="")
        check(outcome.status in (1, 3),
              f"Without ({rule.off}) the program ends with status ({outcome.status}): the test "
              "cannot fail.")


@case
def switches():
    """Optimisations of the client, each switched off: nothing but the speed may change."""
    with Daemon() as daemon:
        for switch in ("post", "inline", "staging", "reserve"):
            env = client_env(daemon, PENSTOCK_DISABLE=switch)
            rules = ["release_after_data", "small_rules", "failing_call",
                     "copy_behind_kernel_pageable"]
            if switch == "post":  # every call waits, and yet no function of the program is in its way
                rules.append("host_functions")
            for rule in rules:
                outcome = _run(RULES[rule], env)
                _verdict(RULES[rule], outcome, f"without ({switch})")
                print(f"{outcome.seconds:.2f} s without {switch}: {rule}")


@case
def sticky_fault(where):
    """A faulting program ends alone: its neighbour on the same device computes on."""
    def both(env):
        with Scratch() as scratch:
            neighbour = start([program("steady_rounds"), "40", scratch / "ready"], env,
                              stdout=subprocess.PIPE, text=True)
            try:
                wait_until(lambda: os.path.exists(scratch / "ready"), PROGRAM_LIMIT_S,
                           "The neighbour does not begin.")
                outcome = check_ok(run([program("sticky_fault")], env), "sticky_fault")
                out, _ = neighbour.communicate(timeout=PROGRAM_LIMIT_S)
            finally:
                neighbour.kill()
                neighbour.wait()
            check_equal(neighbour.returncode, 0, "The neighbour's status")
            check_equal(out, "steady_rounds: 40 rounds, ok\n", "What the neighbour says")
            print(outcome.out, end="")
    if where == "direct":
        both(direct_env())
    else:
        with Daemon() as daemon:
            both(client_env(daemon))


@case
def programs_at_once():
    """Three programs on one daemon at the same time, then the same program twice in a row."""
    commands = [["steady_rounds", "20"], ["context_migration"], ["steady_rounds", "20"]]
    with Daemon() as daemon:
        running = [start([program(command[0]), *command[1:]], client_env(daemon),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                   for command in commands]
        for command, process in zip(commands, running):
            out, _ = process.communicate(timeout=2 * PROGRAM_LIMIT_S)
            check_equal(process.returncode, 0, f"The status of {command}, which says ({out}),")
        outputs = [check_ok(run([program("context_migration")], client_env(daemon)), "The program")
                   .out for _ in range(2)]
        check_equal(outputs[1], outputs[0], "The output of the second run")


if len(sys.argv) == 2 and sys.argv[1] == "list":  # for CMake: one line per test
    for rule_name, each in RULES.items():
        print(rule_name, "off" if each.off else "on")
else:
    main()
