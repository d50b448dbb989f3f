# What a daemon tells of itself, and what it can be told to do. A connection gets here only after
# the hello of protocol/hello.h (Role kManagement), so whoever calls holds the key, if there is one.
# Fields are only ever added.
@0xadbcb834215ce165;

using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("penstock::control::wire");

struct Gpu {
  ordinal @0 :UInt32;       # in the server's driver
  name @1 :Text;
  uuid @2 :Text;
  memory @3 :UInt64;        # bytes, of the device
  slots @4 :UInt32;         # 0: shared without slots
  slotsTaken @5 :UInt32;
  slotMemory @6 :UInt64;    # bytes; 0: no limit but the device's
}

struct Session {
  id @0 :UInt64;
  host @1 :Text;            # as the client says
  pid @2 :UInt32;
  program @3 :Text;
  peer @4 :Text;            # address and port that the connection comes from
  gpus @5 :List(UInt32);    # ordinals
  path @6 :Text;            # tcp, rdma or shm; empty while it is not decided
  memory @7 :UInt64;        # bytes allocated, all GPUs
  calls @8 :UInt64;         # frames of calls
  received @9 :UInt64;      # bytes, calls and data
  sent @10 :UInt64;
  seconds @11 :Float64;     # since it began
}

struct Status {
  host @0 :Text;
  version @1 :Text;
  driverVersion @2 :Int32;
  driverError @3 :Text;     # empty if the driver works
  draining @4 :Bool;
  mostSessions @5 :UInt32;
  gpus @6 :List(Gpu);       # that are offered
  sessions @7 :List(Session);
}

interface Daemon {
  status @0 () -> (status :Status);
  # No new sessions from now on; those that are there go on. And the reverse.
  drain @1 () -> (sessions :UInt32);
  resume @2 ();
}
