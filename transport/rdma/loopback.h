// Through a NIC and back to it: two connected queue pairs on one device of this process.
//
// Whether a NIC reaches the memory of a GPU no attribute tells: PCIe access control, an IOMMU or a
// switch in between may swallow the accesses, refuse them or send them elsewhere. So it is tried,
// and not on the queue pairs of the session, which a failure would break and a hang would block.
//
// The near queue pair is in the session's protection domain, where the GPU's memory is registered,
// and does what the session's bulk queue pairs do: READ into device memory, WRITE out of it. The
// far one is in a domain of its own with one page-aligned buffer, the only memory of the server
// that anybody may read or write remotely, and only until the loopback goes. Who connects must
// know a random token, and no key of that buffer is ever sent anywhere.
#pragma once

#include <memory>
#include <string>

#include "common/clock.h"
#include "common/result.h"
#include "transport/rdma/domain.h"
#include "transport/transport.h"

namespace penstock::transport::rdma {

// On the device that has this address.
Result<std::unique_ptr<Loopback>> OpenLoopback(std::shared_ptr<Domain> domain,
                                               const std::string& address, Deadline deadline);

}  // namespace penstock::transport::rdma
