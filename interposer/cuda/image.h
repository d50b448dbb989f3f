// The code images that programs hand to the driver: what kind one is and how long, which nobody
// says: cuModuleLoadData takes a bare pointer.
#pragma once

#include <cstdint>
#include <vector>

#include "common/result.h"
#include "protocol/operations.h"

namespace penstock::interposer {

struct ImagePart {
  const void* data = nullptr;
  uint64_t bytes = 0;
};

struct Image {
  ImageFormat format = ImageFormat::kPtx;
  std::vector<ImagePart> parts;
};

// Reads headers only as far as each has been found to be what it must be, so a malformed image is
// refused (kInvalidArgument) rather than followed.
Result<Image> MeasureImage(const void* image);

}  // namespace penstock::interposer
