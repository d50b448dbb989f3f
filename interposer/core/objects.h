// Every object that the program has made, on whichever server it lives: what handles and addresses
// mean in this process. The sessions of one client share it, so that a handle tells where it
// belongs and no two servers' objects can be taken for each other.
//
// Each object belongs to a context and each context to a session; libraries and their kernels
// belong to none and are loaded in a session when they are first used there (cuda/library.h).
#pragma once

#include "interposer/core/address_plan.h"
#include "interposer/core/record_table.h"
#include "interposer/core/records.h"

namespace penstock::interposer {

struct Objects {
  explicit Objects(bool reserve_addresses) : plan(reserve_addresses) {}

  RecordTable<ContextRecord> contexts{HandleKind::kContext};  // but for the primary ones
  RecordTable<StreamRecord> streams{HandleKind::kStream};
  RecordTable<EventRecord> events{HandleKind::kEvent};
  RecordTable<ModuleRecord> modules{HandleKind::kModule};
  RecordTable<ModuleRecord> libraries{HandleKind::kLibrary};
  RecordTable<FunctionRecord> functions{HandleKind::kFunction};
  RecordTable<FunctionRecord> kernels{HandleKind::kKernel};
  RecordTable<LinkRecord> links{HandleKind::kLink};
  AddressPlan plan;
};

}  // namespace penstock::interposer
