#include "transport/rdma/queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/log.h"
#include "transport/rdma/memlock.h"

namespace penstock::transport::rdma {
namespace {

constexpr uint8_t kMinRnrTimer = 12;  // 0.64 ms
constexpr uint32_t kEventsAtOnce = 64;

std::string WithReason(const std::string& what, int error) {
  char text[128];
  return what + ": " + strerror_r(error, text, sizeof text) + "." + MemlockAdvice(error);
}

}  // namespace

const char* CompletionName(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_LEN_ERR:
      return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
      return "local queue pair operation error";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_LOC_ACCESS_ERR:
      return "local access error";
    case IBV_WC_WR_FLUSH_ERR:
      return "flushed";
    case IBV_WC_REM_INV_REQ_ERR:
      return "the peer calls the request invalid";
    case IBV_WC_REM_ACCESS_ERR:
      return "the peer refuses the access";
    case IBV_WC_REM_OP_ERR:
      return "the peer cannot carry it out";
    case IBV_WC_RETRY_EXC_ERR:
      return "the peer does not answer";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the peer posts no receives";
    default:
      return "a fatal error";
  }
}

uint8_t ReadDepth(Verbs& verbs, ibv_context* context, ReadSide side) {
  constexpr int kMostReads = 16;
  ibv_device_attr device = {};
  if (verbs.QueryDevice(context, &device) != 0) return kMostReads;
  const int depth = side == ReadSide::kStarts ? device.max_qp_init_rd_atom : device.max_qp_rd_atom;
  return static_cast<uint8_t>(std::clamp(depth, 1, kMostReads));
}

QueuePair::QueuePair(Verbs& verbs, rdma_cm_id* id, const QueuePairShape& shape)
    : verbs_(verbs), id_(id), ledger_(shape.send_depth), receive_depth_(shape.receive_depth) {}

Result<std::unique_ptr<QueuePair>> QueuePair::Make(Verbs& verbs, rdma_cm_id* id,
                                                   const QueuePairShape& shape) {
  std::unique_ptr<QueuePair> pair(new QueuePair(verbs, id, shape));
  const auto name = [&] { return std::string(verbs.GetDeviceName(id->verbs->device)); };
  const auto make_cq = [&](uint32_t entries, ibv_comp_channel* channel) {
    errno = ENOMEM;
    return verbs.CreateCq(id->verbs, static_cast<int>(entries), nullptr, channel, 0);
  };
  pair->send_cq_ = make_cq(shape.send_depth, shape.send_channel);
  if (pair->send_cq_ != nullptr) {
    pair->receive_cq_ = make_cq(shape.receive_depth, shape.receive_channel);
  }
  const auto fail = [&](const char* what) {
    std::string text = WithReason(what + name(), errno);
    pair->id_ = nullptr;
    return Fail(Code::kResourceExhausted, std::move(text));
  };
  if (pair->receive_cq_ == nullptr) return fail("Cannot make a completion queue on ");
  // A device that grants less inline room may refuse the wish instead of cutting it.
  for (const uint32_t inline_bytes : {shape.inline_bytes, shape.inline_bytes / 4, 0u}) {
    ibv_qp_init_attr attributes = {};
    attributes.send_cq = pair->send_cq_;
    attributes.recv_cq = pair->receive_cq_;
    attributes.cap.max_send_wr = shape.send_depth;
    attributes.cap.max_recv_wr = shape.receive_depth;
    attributes.cap.max_send_sge = shape.send_sge;
    attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = inline_bytes;
    attributes.qp_type = IBV_QPT_RC;
    if (verbs.CreateQp(id, shape.pd, &attributes) == 0) {
      pair->inline_bytes_ = attributes.cap.max_inline_data;
      return pair;
    }
    if (errno != EINVAL || inline_bytes == 0) break;
  }
  return fail("Cannot make a queue pair on ");
}

QueuePair::~QueuePair() {
  if (id_ != nullptr && id_->qp != nullptr) {
    Break();
    verbs_.DestroyQp(id_);
  }
  if (send_cq_ != nullptr) {
    if (send_events_ > 0) verbs_.AckCqEvents(send_cq_, send_events_);
    verbs_.DestroyCq(send_cq_);
  }
  if (receive_cq_ != nullptr) {
    if (receive_events_ > 0) verbs_.AckCqEvents(receive_cq_, receive_events_);
    verbs_.DestroyCq(receive_cq_);
  }
  if (id_ != nullptr) verbs_.DestroyId(id_);
}

Status QueuePair::Settle(const RdmaOptions& options, uint32_t reads) {
  if (id_->verbs->device->transport_type != IBV_TRANSPORT_IWARP) {  // which has no such timer
    ibv_qp_attr attributes = {};
    attributes.min_rnr_timer = kMinRnrTimer;
    if (const int error = verbs_.ModifyQp(qp(), &attributes, IBV_QP_MIN_RNR_TIMER)) {
      char text[128];
      LOG_WARNING("transport",
                  "Cannot set the timer of receivers that are not ready: %s. A late receive may "
                  "stall the peer for 0.7 s.",
                  strerror_r(error, text, sizeof text));
    }
  }
  ibv_qp_attr attributes = {};
  ibv_qp_init_attr made = {};
  constexpr int kMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_MAX_QP_RD_ATOMIC;
  if (const int error = verbs_.QueryQp(qp(), &attributes, kMask, &made)) {
    return Fail(Code::kSystem, WithReason("Cannot query a queue pair", error));
  }
  if (attributes.qp_state != IBV_QPS_RTS && attributes.qp_state != IBV_QPS_SQD) {
    return Fail(Code::kUnavailable, "A queue pair broke while it was being connected (state " +
                                        std::to_string(attributes.qp_state) + ").");
  }
  reads_ =
      attributes.max_rd_atomic == 0 ? reads : std::min<uint32_t>(reads, attributes.max_rd_atomic);
  if (attributes.timeout != options.timeout || attributes.retry_cnt != options.retry_count) {
    LOG_DEBUG("transport",
              "The device chose another time-out (%u instead of %u) or retry count (%u instead of "
              "%u) of its own.",
              attributes.timeout, options.timeout, attributes.retry_cnt, options.retry_count);
  }
  return {};
}

bool QueuePair::Break() {
  if (std::exchange(broken_, true)) return breaks_;
  ibv_qp_attr attributes = {};
  attributes.qp_state = IBV_QPS_ERR;
  breaks_ = verbs_.ModifyQp(qp(), &attributes, IBV_QP_STATE) == 0;
  return breaks_;
}

void QueuePair::CountEvent(ibv_cq* cq) {
  uint32_t& events = cq == send_cq_ ? send_events_ : receive_events_;
  if (++events < kEventsAtOnce) return;
  verbs_.AckCqEvents(cq, events);
  events = 0;
}

}  // namespace penstock::transport::rdma
