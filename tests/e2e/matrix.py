#!/usr/bin/env python3
"""Every sample in every variant: the same output directly on simgpu and through tcp, with program
and daemon in two network namespaces."""

from harness import *


def _one(name, variant, env, namespace, where):
    outcome = check_ok(run([sample(variant, name)], env, namespace), f"{variant}/{name} {where}")
    lines = outcome.out.splitlines()
    check(lines and lines[-1].startswith(f"{name}: ") and lines[-1].endswith(", ok"),
          f"{variant}/{name} {where} says:\n{outcome.out}")
    return outcome


def _direct(variant):
    outcomes = {}
    for name in SAMPLES:
        outcomes[name] = _one(name, variant, direct_env(), None, "on simgpu")
        print(f"{outcomes[name].seconds:6.2f} s on simgpu   {variant}/{name}", flush=True)
    return outcomes


@case
def direct():
    for variant in VARIANTS:
        _direct(variant)


@case
def remote(variant):
    become_root()
    direct_outcomes = _direct(variant)
    with TwoHosts() as hosts, Daemon(hosts.server_host, hosts.server) as daemon:
        for name in SAMPLES:
            outcome = _one(name, variant, client_env(daemon), hosts.client, "through tcp")
            print(f"{outcome.seconds:6.2f} s through tcp {variant}/{name}", flush=True)
            check_equal(outcome.out, direct_outcomes[name].out, f"The output of {variant}/{name}")


main()
