// What the supervisor knows of those who knock and of those who are in: listener.cc and
// management.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/log.h"
#include "protocol/device_name.h"
#include "server/listener.h"
#include "server/meter.h"

namespace penstock::server {

// Names of a client are put into log lines: nothing but plain characters.
inline std::string Plain(const char* text) {
  std::string plain(text);
  for (char& c : plain) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return plain;
}

struct Supervisor::Peer {
  enum class State {
    kHello,     // reads a client hello or a bulk hello
    kProof,     // reads the proof
    kStarting,  // its worker starts
    kWelcomed,  // waits for the bulk socket
    kBulk,      // bulk welcome under way, then hand-over
    kManaging,  // welcome under way, then the control plane has it
    kLeaving,   // refusal under way
    kGone,
  };
  UniqueFd fd;
  std::string name;
  State state = State::kHello;
  Deadline deadline = Deadline::Never();
  std::vector<std::byte> in, out;
  ClientHello hello;
  Challenge challenge;
  uint64_t session = 0;

  // Somebody who has proved nothing, or is on the way out: what strangers can have many of.
  bool proven() const { return state == State::kStarting || state == State::kWelcomed; }
  std::string Host() const { return name.substr(0, name.rfind(':')); }
  std::string Who() const {
    if (hello.host[0] == '\0') return name;
    return name + ", host " + Plain(hello.host) + ", pid " + std::to_string(hello.pid) +
           ", program " + Plain(hello.program);
  }
};

struct Supervisor::Session {
  uint64_t id = 0;
  Nonce ticket{};
  Child child;
  UniqueFd socket;  // to the worker
  ClientHello hello;
  Challenge challenge;
  std::string who, peer;
  uint32_t slot = 0;           // gives the worker's uid
  std::vector<uint32_t> gpus;  // the ordinals of its devices here, in the client's order
  struct Unmap {
    void operator()(SessionMeter* meter) const { UnmapMeter(meter); }
  };
  std::unique_ptr<SessionMeter, Unmap> meter;  // null: it could not be mapped
  bool handed_over = false;
  bool ended = false;
  int64_t started_ns = 0;
};

}  // namespace penstock::server
