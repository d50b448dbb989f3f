// The bulk plane of a tcp connection: moves between registered memories over a socket of its own,
// so that a large copy never delays a call.
//
// One thread per end drives the socket without blocking, in both roles (a submitter stands in for
// it while it sleeps, for small moves):
//   active   cuts this end's Gets and Puts into chunks, keeps a window of them under way,
//            round-robin over the moves, and reports each move when its last chunk is answered;
//   passive  answers the peer's chunks. Each chunk carries key and ranges and is checked by itself,
//            so this side remembers nothing about moves and no peer can make it.
// The bytes go between socket and registered memory directly. Each recv or send is made under the
// region's mutex (see region_table.h). When memory is deregistered between two of them, the rest of
// the chunk is received into, or sent from, a scrap buffer, and the chunk is answered kRefused.
//
// Messages, each a BulkHeader of 64 bytes, some with payload behind:
//   active -> passive   kGet (range)          kPut (range) + payload
//   passive -> active   kData (bytes) + payload, only before a kDone of a Get
//                       kDone (status)        one for every kGet and kPut
// Sending and receiving are independent state machines of one poll loop: two ends that both send
// much cannot lock each other up.
//
// This thread is also the connection's watchdog, for both sockets: see WatchPeer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "transport/completion_queue.h"
#include "transport/region_table.h"
#include "transport/tcp/lifeline.h"
#include "transport/tcp/tcp.h"
#include "transport/waker.h"

namespace penstock::transport::tcp {

constexpr uint64_t kMaxBulkChunk = 16 << 20;
constexpr uint32_t kMaxBulkChunksInFlight = 256;  // a peer with more unanswered breaks the protocol

struct BulkHeader {
  uint32_t type;
  uint32_t status;    // kDone: a WireStatus
  uint32_t slot;      // names the chunk in the active end's table
  uint32_t sequence;  // tells successive uses of the slot apart
  uint64_t bytes;     // of this chunk
  uint64_t offset;
  uint64_t move_bytes;  // the whole move: refused as a whole, before any of it touches memory
  uint64_t move_offset;
  uint32_t key_slot;
  uint32_t key_generation;
  uint64_t key_secret;
};
static_assert(sizeof(BulkHeader) == 64);

enum BulkType : uint32_t {
  kGet = 0x31544547,   // "GET1"
  kPut = 0x31545550,   // "PUT1"
  kData = 0x31544144,  // "DAT1"
  kDone = 0x314e4f44,  // "DON1"
};
enum WireStatus : uint32_t { kWireOk = 0, kWireRefused = 1 };

class BulkEngine {
 public:
  BulkEngine(Lifeline& life, CompletionQueue& completions, std::shared_ptr<RegionTable> regions,
             const TcpOptions& options);
  ~BulkEngine();

  void Start();
  // Joins the thread. The lifeline is closed before. Afterwards no memory is touched and every move
  // has its completion.
  void Stop();
  // True when the thread has ended and every completion is in the queue.
  bool finished() const { return finished_.load(std::memory_order_acquire); }

  Outcome Submit(BulkType type, std::shared_ptr<Region> local, uint64_t local_offset,
                 const MemoryKey& key, uint64_t remote_offset, uint64_t bytes, uint64_t cookie);

  // Pairs with the release after each chunk received into registered memory. Whoever learns from a
  // frame that a Put is in place passes here first, so the bytes are ordered before the news in
  // this process's own memory model too, and not only by the kernel.
  void AcquireReceived() const { received_chunks_.load(std::memory_order_acquire); }

  uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }
  uint64_t bytes_received() const { return bytes_received_.load(std::memory_order_relaxed); }
  bool valid() const { return waker_.valid(); }
  void AbandonAfterFork() { waker_.AbandonAfterFork(); }

 private:
  struct Move {
    BulkType type;
    std::shared_ptr<Region> local;
    uint64_t local_offset;
    KeyBlob key;
    uint64_t remote_offset;
    uint64_t bytes;
    uint64_t cookie;
    uint64_t issued = 0;     // bytes in chunks that were started
    uint32_t in_flight = 0;  // chunks without an answer
    BulkStatus status = BulkStatus::kOk;
  };
  struct Chunk {
    Move* move = nullptr;  // nullptr: the slot is free
    uint64_t offset = 0;   // within the move
    uint64_t bytes = 0;
    uint32_t sequence = 0;
    bool sent = false;  // the request and its payload have left: an answer is possible
    bool data_received = false;
  };
  // A message to send: header, payload out of a region, and for a served Get the kDone behind it.
  struct Outgoing {
    BulkHeader header;
    std::shared_ptr<Region> region;
    uint64_t offset = 0;  // of the payload in the region
    uint64_t bytes = 0;
    bool has_trailer = false;
    BulkHeader trailer = {};
    uint64_t sent = 0;
    bool reply = false;
  };
  // What the bytes after the current header are for.
  struct Incoming {
    BulkHeader header;
    std::shared_ptr<Region> region;  // nullptr: scrap
    uint64_t offset = 0;
    uint64_t left = 0;
    bool spoiled = false;  // some bytes went to scrap
  };

  void Run();
  void AwaitBytes(int bytes);
  void TakeSubmissions();
  void StartChunks();
  void StartChunk(Move& move);
  bool Send();  // false: the socket takes no more now
  bool SendOne(Outgoing& message);
  void OnSent(const Outgoing& message);
  void Receive();
  bool ReceiveOne();  // false: nothing more to read now
  void OnHeader(const BulkHeader& header);
  void OnPayload();
  void ServeGet(const BulkHeader& header);
  void ServePut(const BulkHeader& header);
  void OnData(const BulkHeader& header);
  void OnDone(const BulkHeader& header);
  void Reply(const BulkHeader& request, WireStatus status);
  Chunk* FindChunk(const BulkHeader& header);
  void Spoil(Move& move, BulkStatus status);
  void FinishIfDone(Move& move);
  void PeerLeft(int error);  // an errno, or 0 for an orderly end
  void Violation(const std::string& what);
  void WatchPeer();
  bool PeerSilent(int fd) const;
  void FinishAll();

  Lifeline& life_;
  CompletionQueue& completions_;
  const std::shared_ptr<RegionTable> regions_;
  const uint64_t chunk_bytes_, window_bytes_;
  const int tick_ms_;
  Waker waker_;
  std::thread thread_;
  std::atomic<bool> finished_{false};
  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0}, received_chunks_{0};

  std::mutex submit_mutex_;
  std::deque<std::unique_ptr<Move>> submitted_;  // under submit_mutex_
  size_t unfinished_ = 0;                        // under submit_mutex_
  bool accepting_ = true;                        // under submit_mutex_

  // Held by whoever drives the machine: the thread, except while it sleeps in poll(), or a
  // submitter in that time. Everything below is under it.
  std::mutex turn_mutex_;
  std::unordered_map<Move*, std::unique_ptr<Move>> moves_;
  std::deque<Move*> to_issue_;  // moves with bytes not yet in chunks
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> free_chunks_;
  uint64_t bytes_in_flight_ = 0;
  std::deque<Outgoing> outgoing_;
  uint32_t replies_queued_ = 0;
  uint64_t payload_queued_ = 0;  // of this end's Puts
  BulkHeader header_ = {};
  size_t header_got_ = 0;
  Incoming incoming_ = {};
  std::unique_ptr<std::byte[]> scrap_;
  std::unique_ptr<std::byte[]> zeros_;
  int awaited_bytes_ = 1;  // the socket's SO_RCVLOWAT
  int silent_ticks_ = 0;
  int64_t next_tick_ns_ = 0;
};

}  // namespace penstock::transport::tcp
