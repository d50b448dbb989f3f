// A Connection around another one that makes things go wrong on purpose, for tests of those who use
// connections. What goes wrong is scripted by counts ("the third commit") or drawn from a seed, so
// a failure can be repeated. Without delays and closes, everything it does is allowed by the
// contract of transport.h ("benign"): a correct user never notices.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace penstock::transport::fault {

struct FaultPlan {
  uint64_t seed = 1;

  // Closes the connection in place of the Nth commit, delivery of a frame, or Get or Put. Counted
  // from 1; 0 is never.
  uint64_t close_at_commit = 0;
  uint64_t close_at_frame = 0;
  uint64_t close_at_bulk = 0;

  // The answers of successive Reserve calls, over and over: 'a' is kAgain, anything else passes the
  // call on. "..a" makes every third call fail.
  std::string reserve_pattern;

  // These Gets and Puts (counted from 1) are reported kRefused and do nothing; others with this
  // chance in a thousand.
  std::vector<uint64_t> refuse_bulk;
  uint32_t refuse_permille = 0;

  // Each frame is held back up to this long; their order stays. Completions are held back too if
  // asked for, each on its own, so that they change order.
  uint32_t delay_us = 0;
  bool reorder_completions = false;
};

std::unique_ptr<Connection> FaultConnection(std::unique_ptr<Connection> inner, FaultPlan plan);

}  // namespace penstock::transport::fault
