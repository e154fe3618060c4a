// The functions of torch's stable C ABI (torch >= 2.10) that the binding and the CPU loop call, declared by hand, as torch's
// own headers take longer to compile than a whole kernel file. A test compiles this together with those headers, so that a
// declaration that differs from torch's is an error.
#pragma once

#include <torch/headeronly/version.h>

#include <cstdint>
#include <new>

struct AtenTensorOpaque;
struct TorchLibraryOpaque;
struct DeviceGuardOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using DeviceGuardHandle = DeviceGuardOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;

extern "C" {
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();

AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* contiguous);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* bytes);

AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* another);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking);
AOTITorchError aoti_torch_zero_(AtenTensorHandle self);
AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack, uint64_t version);

AOTITorchError aoti_torch_library_init_fragment(const char* ns, const char* file, uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line,
                                            TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*function)(StableIValue*, uint64_t, uint64_t), uint64_t version);

AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* guard);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);
AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

// The reason why this thread's last call failed. Null with torch before 2.13, which writes it to the log only.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace jitact::loops {

extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*), void*);

// Runs `count` tasks in torch's threads. Exceptions in them become an error code; the only one that occurs is bad_alloc.
inline void in_parallel(int64_t count, int64_t grain, void (*run)(int64_t, int64_t, void*), const void* context) {
  if (torch_parallel_for(0, count, grain, run, const_cast<void*>(context)) != 0) throw std::bad_alloc();
}

}  // namespace jitact::loops
