// The handlers of protocol/operations.h, in server/exec/. Codegen makes those of the other rows.
#pragma once

#include <span>

#include "server/worker/call_context.h"

namespace penstock::server {

CUresult ServeLaunch(CallContext& call, Reader& reader);
CUresult ServeUpload(CallContext& call, Reader& reader);
CUresult ServeDownload(CallContext& call, Reader& reader);
CUresult ServeUploadVolume(CallContext& call, Reader& reader);
CUresult ServeDownloadVolume(CallContext& call, Reader& reader);
CUresult ServeLoadModule(CallContext& call, Reader& reader);
CUresult ServeGetFunction(CallContext& call, Reader& reader);
CUresult ServeListFunctions(CallContext& call, Reader& reader);
CUresult ServeLinkCreate(CallContext& call, Reader& reader);
CUresult ServeLinkAdd(CallContext& call, Reader& reader);
CUresult ServeLinkComplete(CallContext& call, Reader& reader);
CUresult ServeLinkRead(CallContext& call, Reader& reader);
CUresult ServeLinkDestroy(CallContext& call, Reader& reader);
CUresult ServeBounceDone(CallContext& call, Reader& reader);
CUresult ServeWaitStreamProgress(CallContext& call, Reader& reader);
CUresult ServeHostFunction(CallContext& call, Reader& reader);
CUresult ServeHostFunctionDone(CallContext& call, Reader& reader);

}  // namespace penstock::server
