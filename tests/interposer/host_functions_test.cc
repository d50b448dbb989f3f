// Host functions on the client's side, against a scripted server.
#include <catch2/catch.hpp>
#include <future>

#include "tests/interposer/scripted_server.h"

using namespace penstock;
using namespace penstock::interposer;

namespace {

constexpr uint32_t kFunction = static_cast<uint32_t>(Operation::kHostFunction);
constexpr uint32_t kDone = static_cast<uint32_t>(Operation::kHostFunctionDone);
constexpr auto kSoon = std::chrono::seconds(5);

// One that has run, with what it was told.
struct Ran {
  std::promise<CUresult> promise;
  std::future<CUresult> future = promise.get_future();
  CUstream stream = nullptr;

  bool soon() { return future.wait_for(kSoon) == std::future_status::ready; }
  HostFunction Function(Session& session) {
    HostFunction function;
    function.function = [](void* user) {
      static_cast<Ran*>(user)->promise.set_value(CUDA_SUCCESS);
    };
    function.user = this;
    function.context = &session.primary_contexts[0];
    return function;
  }
  HostFunction Callback(Session& session) {
    HostFunction function = Function(session);
    function.function = nullptr;
    function.stream = CU_STREAM_PER_THREAD;
    function.callback = [](CUstream its_stream, CUresult status, void* user) {
      static_cast<Ran*>(user)->stream = its_stream;
      static_cast<Ran*>(user)->promise.set_value(status);
    };
    return function;
  }
};

// As the entries do.
uint64_t Enqueue(Session& session, const HostFunction& function) {
  const uint64_t id = session.host_functions().Add(function);
  REQUIRE(id != 0);
  const HostFunctionCommand command{1, id};
  OutgoingCall call;
  call.function = kFunction;
  call.command = &command;
  call.command_bytes = sizeof command;
  REQUIRE(session.Post(call, nullptr) == CUDA_SUCCESS);
  return id;
}

}  // namespace

// Nobody but the thread of the functions receives here, so it must do that itself.
TEST_CASE("a function runs at its turn, and the server hears of its return",
          "[interposer][host_functions]") {
  std::promise<uint64_t> returned;
  std::atomic<bool> has_run{false}, too_early{false}, too_soon_over{false};
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function == kFunction) {
      too_early = has_run.load();
      self.Turn(call.As<HostFunctionCommand>().id, CUDA_SUCCESS);
    }
    if (call.header.function == kDone) {
      too_soon_over = !has_run;
      returned.set_value(call.As<HostFunctionDoneCommand>().id);
    }
  });
  auto session = server.Connect();
  HostFunction function;
  function.function = [](void* user) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    *static_cast<std::atomic<bool>*>(user) = true;
  };
  function.user = &has_run;
  function.context = &session->primary_contexts[0];
  const uint64_t id = Enqueue(*session, function);
  std::future<uint64_t> future = returned.get_future();
  REQUIRE(future.wait_for(kSoon) == std::future_status::ready);
  CHECK(future.get() == id);
  CHECK_FALSE(too_early);
  CHECK_FALSE(too_soon_over);
}

TEST_CASE("a callback hears of an error, a host function is dropped; neither returns to the server",
          "[interposer][host_functions]") {
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function != kFunction) return;
    self.Turn(call.As<HostFunctionCommand>().id, CUDA_ERROR_ILLEGAL_ADDRESS);
  });
  auto session = server.Connect();
  Ran function, callback;
  Enqueue(*session, function.Function(*session));
  Enqueue(*session, callback.Callback(*session));
  REQUIRE(callback.soon());
  CHECK(callback.future.get() == CUDA_ERROR_ILLEGAL_ADDRESS);
  CHECK(callback.stream == CU_STREAM_PER_THREAD);
  session->host_functions().Drain(session->primary_contexts[0]);
  CHECK(function.future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  for (const SeenCall& call : server.seen()) CHECK(call.header.function != kDone);
}

TEST_CASE("when the session breaks, callbacks that wait are told so",
          "[interposer][host_functions]") {
  ScriptedServer server([](ScriptedServer& self, const SeenCall& call) {
    if (call.As<HostFunctionCommand>().id == 3) self.HangUp();
  });
  auto session = server.Connect();
  Ran first, second, third;
  Enqueue(*session, first.Callback(*session));
  Enqueue(*session, second.Function(*session));
  Enqueue(*session, third.Callback(*session));
  REQUIRE(first.soon());
  CHECK(first.future.get() == CUDA_ERROR_DEVICE_UNAVAILABLE);
  REQUIRE(third.soon());
  CHECK(third.future.get() == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(second.future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  CHECK(session->host_functions().Add(first.Function(*session)) == 0);
}

TEST_CASE("a function that is forgotten does not run, though its turn has come",
          "[interposer][host_functions]") {
  ScriptedServer server([](ScriptedServer&, const SeenCall&) {});
  auto session = server.Connect();
  HostFunctions& functions = session->host_functions();
  std::promise<void> leave;
  HostFunction first;
  first.function = [](void* user) { static_cast<std::promise<void>*>(user)->get_future().wait(); };
  first.user = &leave;
  first.context = &session->primary_contexts[0];
  Ran second, third;
  const uint64_t one = functions.Add(first), two = functions.Add(second.Callback(*session)),
                 three = functions.Add(third.Callback(*session));
  for (const uint64_t id : {one, two, three}) CHECK(functions.Reached(id, CUDA_SUCCESS));
  functions.Forget(two);
  leave.set_value();
  REQUIRE(third.soon());
  CHECK(second.future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
}

TEST_CASE("a context's functions are over before it goes, others may not be",
          "[interposer][host_functions]") {
  std::atomic<uint64_t> slow_id{0};
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function != kFunction) return;
    if (call.As<HostFunctionCommand>().id == slow_id) {
      self.Turn(slow_id, CUDA_SUCCESS);
    }
  });
  auto session = server.Connect();
  ContextRecord mine, other;
  std::atomic<bool> has_run{false};
  Ran never;
  HostFunction idle = never.Function(*session);
  idle.context = &other;
  Enqueue(*session, idle);
  HostFunction slow;
  slow.function = [](void* user) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    *static_cast<std::atomic<bool>*>(user) = true;
  };
  slow.user = &has_run;
  slow.context = &mine;
  slow_id = 2;
  Enqueue(*session, slow);
  session->host_functions().Drain(mine);
  CHECK(has_run);
  session->host_functions().DropContext(other);
  session->host_functions().Drain(other);
}

TEST_CASE("a function that does not return keeps no session from ending",
          "[interposer][host_functions]") {
  static std::atomic<bool> leave, left;
  leave = left = false;
  ScriptedServer server([&](ScriptedServer& self, const SeenCall& call) {
    if (call.header.function != kFunction) return;
    self.Turn(call.As<HostFunctionCommand>().id, CUDA_SUCCESS);
  });
  std::promise<void> entered;
  HostFunction stuck;
  stuck.function = [](void* user) {
    static_cast<std::promise<void>*>(user)->set_value();
    while (!leave) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    left = true;
  };
  stuck.user = &entered;
  {
    auto session = server.Connect();
    stuck.context = &session->primary_contexts[0];
    Enqueue(*session, stuck);
    entered.get_future().wait();
  }
  CHECK_FALSE(left);
  leave = true;
  while (!left) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
