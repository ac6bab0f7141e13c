// What the operators of this library share: the API, errors, tensors, attributes.
#pragma once
#include <string>
#include <vector>

#include "ort_api.h"

namespace {

const ort::Api* api;

ort::Status* failed(const char* what, cudaError_t error) {
  return api->make_status(ort::kFail, (std::string("onnx_mtp: ") + what + ": " + cudaGetErrorString(error)).c_str());
}

#define TRY(expression)                                        \
  do {                                                         \
    if (ort::Status* status_ = (expression)) return status_;   \
  } while (0)
#define TRY_CUDA(what, expression)                                              \
  do {                                                                          \
    cudaError_t error_ = (expression);                                          \
    if (error_ != cudaSuccess) return failed(what, error_);                     \
  } while (0)

struct Tensor {
  int element;
  std::vector<int64_t> dims;
  void* data;
  int64_t elements() const {
    int64_t e = 1;
    for (int64_t d : dims) e *= d;
    return e;
  }
};

ort::Status* read_tensor(const ort::KernelContext* context, size_t index, Tensor* out, bool* there) {
  const ort::Value* value = nullptr;
  TRY(api->input(context, index, &value));
  *there = value != nullptr;
  if (!value) return nullptr;
  ort::Shape* shape;
  TRY(api->shape(value, &shape));
  size_t rank = 0;
  ort::Status* status = api->element(shape, &out->element);
  if (!status) status = api->dim_count(shape, &rank);
  if (!status) {
    out->dims.resize(rank);
    status = api->dims(shape, out->dims.data(), rank);
  }
  api->release(shape);
  if (status) return status;
  return api->data(const_cast<ort::Value*>(value), &out->data);
}

struct Op : ort::CustomOp {
  int element;
};

ort::Status* int_attribute(const ort::KernelInfo* info, const char* name, int64_t fallback, int64_t* out) {
  *out = fallback;
  if (ort::Status* absent = api->int_attribute(info, name, out)) {
    api->release(absent);
    *out = fallback;
  }
  return nullptr;
}

// Refuses a device that the library is not built for.
ort::Status* check_device(const char* op, int* multiprocessors) {
  int device, major, minor;
  TRY_CUDA("no current device", cudaGetDevice(&device));
  TRY_CUDA("no device attribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  TRY_CUDA("no device attribute", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  TRY_CUDA("no device attribute", cudaDeviceGetAttribute(multiprocessors, cudaDevAttrMultiProcessorCount, device));
  if (major != 9 || minor != 0)
    return api->make_status(ort::kFail, (std::string(op) + ": built for compute capability 9.0, the GPU has " + std::to_string(major) +
                                         "." + std::to_string(minor) + ": use an artifact with stock kernels").c_str());
  return nullptr;
}

}  // namespace
