// Rows as a picture: how fast moves of each size are. gnuplot draws it.
#pragma once

#include <string>
#include <vector>

#include "common/result.h"
#include "tools/penstock-perf/rows.h"

namespace penstock::perf {

// Writes FILE.png: one line per name of the rows that have a size, GB/s over bytes, both
// logarithmic, and what they are compared with dashed. An error without gnuplot, or where no row
// has a size.
Status Plot(const std::vector<Row>& rows, const std::string& file);

}  // namespace penstock::perf
