// Libraries and their kernels belong to no context: they are loaded into each context when first
// used there, and stay valid when a context is reset.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace simgpu {

class Context;
class Module;

class Library {
 public:
  explicit Library(std::string ptx) : ptx_(std::move(ptx)) {}

  // The library's module in this context; loads it if it is not there yet.
  CUresult ModuleIn(const std::shared_ptr<Context>& context, std::shared_ptr<Module>* module);
  void Unload();
  const std::string& ptx() const { return ptx_; }

  CUlibrary handle = nullptr;
  std::vector<std::string> kernel_names;
  std::unordered_map<std::string, CUkernel> kernels;  // all, made when the library is loaded

 private:
  const std::string ptx_;
  std::mutex modules_mutex_;
  std::map<uint64_t, std::weak_ptr<Module>> modules_;  // by context id; guarded
};

struct LibraryKernel {
  std::weak_ptr<Library> library;
  CUlibrary library_handle = nullptr;
  std::string name;
  std::mutex attributes_mutex;
  // Set before a context has loaded the kernel, or for all contexts of a device.
  std::map<std::pair<int, CUfunction_attribute>, int> attributes;  // guarded
};

CUresult FunctionOfKernel(LibraryKernel& kernel, const std::shared_ptr<Context>& context,
                          CUfunction* function);

}  // namespace simgpu
