#include "transport/tcp/sender.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "transport/thread.h"

namespace penstock::transport::tcp {
namespace {

constexpr int kYields = 16;
constexpr int64_t kNapNs = 50'000;
constexpr int64_t kLingerNs = 2'000'000;  // how long after the last work the thread still naps

void Nap(int64_t ns) {
  const timespec time = {0, ns};
  nanosleep(&time, nullptr);
}

}  // namespace

Sender::Sender(Lifeline& life, size_t ring_bytes, uint32_t max_frame)
    : life_(life), max_frame_(max_frame), ring_(ring_bytes, max_frame) {}

Sender::~Sender() {
  Stop();
}

void Sender::Start() {
  if (!StartThread(thread_, "penstock-send", [this] { Run(); })) {
    life_.Close("The system has no thread for sending.", LogLevel::kError);
  }
}

void Sender::Stop() {
  stop_.store(true);
  Wake();
  if (thread_.joinable()) thread_.join();
}

Outcome Sender::Reserve(uint32_t bytes, std::byte** slot) {
  if (life_.closed()) return Outcome::kClosed;
  *slot = ring_.Reserve(bytes);
  if (*slot != nullptr) return Outcome::kOk;
  WakeIfParked();
  return Outcome::kAgain;
}

void Sender::Commit(uint32_t used, uint32_t flags) {
  if (life_.closed()) return;
  uint32_t length;
  std::memcpy(&length, ring_.reserved(), sizeof length);
  if (length != used || used < 8 || used > max_frame_ || used > ring_.reserved_bytes()) {
    life_.Close("A frame to send has a bad length (" + std::to_string(length) + "; committed " +
                    std::to_string(used) + " of " + std::to_string(ring_.reserved_bytes()) +
                    " reserved bytes).",
                LogLevel::kError);
    return;
  }
  ring_.Commit(used);
  // One writer: no need for a locked addition.
  frames_sent_.store(frames_sent() + 1, std::memory_order_relaxed);
  bytes_sent_.store(bytes_sent() + used, std::memory_order_relaxed);
  if (flags & kFlush) {
    FlushHere();
  } else {
    WakeIfParked();
  }
}

Outcome Sender::Flush() {
  if (life_.closed()) return Outcome::kClosed;
  FlushHere();
  if (life_.closed()) return Outcome::kClosed;
  return ring_.empty() ? Outcome::kOk : Outcome::kAgain;
}

void Sender::FlushHere() {
  if (!TakeRole()) return;  // the holder looks at the ring again
  Write();
  GiveRole();
  // What the socket did not take is the sender thread's; so is what was committed meanwhile.
  if (!ring_.empty()) WakeIfParked();
}

Sender::Progress Sender::Write() {
  for (;;) {
    FrameRing::Run run = ring_.pending();
    if (run.bytes == 0) return Progress::kDone;
    constexpr int kFlags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t sent;
    if (run.count == 1) {  // nearly always; send() is the cheaper call
      sent = send(life_.control(), run.parts[0].iov_base, run.parts[0].iov_len, kFlags);
    } else {
      msghdr message = {};
      message.msg_iov = run.parts;
      message.msg_iovlen = run.count;
      sent = sendmsg(life_.control(), &message, kFlags);
    }
    if (sent >= 0) {
      ring_.Consume(sent);
      if (static_cast<size_t>(sent) < run.bytes) return Progress::kBlocked;
    } else if (errno == EAGAIN) {
      return Progress::kBlocked;
    } else if (errno != EINTR) {
      char text[128];
      life_.Close(
          std::string("Cannot send to the peer: ") + strerror_r(errno, text, sizeof text) + ".",
          LogLevel::kInfo);
      return Progress::kFailed;
    }
  }
}

void Sender::Run() {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  int64_t last_work = NowNanoseconds();
  int yields = 0;
  while (!stop_.load() && !life_.closed()) {
    if (!ring_.empty()) {
      Progress progress = Progress::kDone;
      if (TakeRole()) {
        progress = Write();
        GiveRole();
      } else {
        sched_yield();  // a flusher is writing
      }
      if (progress == Progress::kBlocked) {
        pollfd entry = {life_.control(), POLLOUT, 0};
        poll(&entry, 1, 1000);
      }
      last_work = NowNanoseconds();
      yields = 0;
    } else if (yields < kYields) {
      ++yields;
      sched_yield();
    } else if (NowNanoseconds() - last_work < kLingerNs) {
      Nap(kNapNs);
    } else {
      Park();
      last_work = NowNanoseconds();
      yields = 0;
    }
  }
}

void Sender::Park() {
  std::unique_lock lock(park_mutex_);
  parked_.store(true, std::memory_order_seq_cst);
  while (parked_.load() && ring_.empty() && !stop_.load() && !life_.closed()) park_.wait(lock);
  parked_.store(false);
}

void Sender::Wake() {
  {
    std::lock_guard lock(park_mutex_);
    parked_.store(false);
  }
  park_.notify_one();
}

void Sender::Drain(Deadline deadline) {
  const uint64_t target = ring_.head();
  Flush();
  while (ring_.tail() < target && !life_.closed() && !deadline.expired()) Nap(kNapNs);
  // Closing with bytes still queued can turn into a reset that loses them, so wait for the peer's
  // acknowledgement too.
  int queued = 0;
  while (!life_.closed() && ioctl(life_.control(), SIOCOUTQ, &queued) == 0 && queued > 0 &&
         !deadline.expired()) {
    Nap(kNapNs);
  }
}

}  // namespace penstock::transport::tcp
