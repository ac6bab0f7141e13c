// The part of ONNX Runtime's C API that a custom operator needs. The API is a table of functions that only ever grows,
// so a place in it stays what it is; all that is used here is there from version 17 on.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 17;

struct Status;
struct Session;
struct Domain;
struct Value;
struct Shape;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct Attribute;

enum Code : int { kFail = 1, kInvalidArgument = 2 };
enum Element : int { kFloat = 1, kUint8 = 2, kInt32 = 6, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
constexpr int kDeviceMemory = 0, kIntAttribute = 1;

struct Api {
  void* entry[273];

  template <typename Result, typename... Parameters>
  Result call(int place, Parameters... parameters) const {
    return reinterpret_cast<Result (*)(Parameters...)>(entry[place])(parameters...);
  }
  Status* make_status(Code code, const char* text) const { return call<Status*>(0, static_cast<int>(code), text); }
  Status* create_domain(const char* name, Domain** out) const { return call<Status*>(26, name, out); }
  Status* add_op(Domain* domain, const struct CustomOp* op) const { return call<Status*>(27, domain, op); }
  Status* add_domain(Session* options, Domain* domain) const { return call<Status*>(28, options, domain); }
  Status* data(Value* value, void** out) const { return call<Status*>(51, value, out); }
  Status* create_shape(Shape** out) const { return call<Status*>(57, out); }
  Status* set_element(Shape* shape, Element type) const { return call<Status*>(58, shape, static_cast<int>(type)); }
  Status* set_dims(Shape* shape, const int64_t* dims, size_t n) const { return call<Status*>(59, shape, dims, n); }
  Status* element(const Shape* shape, int* out) const { return call<Status*>(60, shape, out); }
  Status* dim_count(const Shape* shape, size_t* out) const { return call<Status*>(61, shape, out); }
  Status* dims(const Shape* shape, int64_t* out, size_t n) const { return call<Status*>(62, shape, out, n); }
  Status* names(const Shape* shape, const char** out, size_t n) const { return call<Status*>(63, shape, out, n); }
  Status* shape(const Value* value, Shape** out) const { return call<Status*>(65, value, out); }
  Status* float_attribute(const KernelInfo* info, const char* name, float* out) const {
    return call<Status*>(85, info, name, out);
  }
  Status* int_attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return call<Status*>(86, info, name, out);
  }
  Status* input_count(const KernelContext* context, size_t* out) const { return call<Status*>(88, context, out); }
  Status* input(const KernelContext* context, size_t i, const Value** out) const {
    return call<Status*>(90, context, i, out);
  }
  Status* output(KernelContext* context, size_t i, const int64_t* dims, size_t n, Value** out) const {
    return call<Status*>(91, context, i, dims, n, out);
  }
  void release(Status* status) const { call<void>(93, status); }
  void release(Shape* shape) const { call<void>(99, shape); }
  Status* stream(const KernelContext* context, void** out) const { return call<Status*>(193, context, out); }
  Status* inferred_input(const ShapeContext* context, size_t i, Shape** out) const {
    return call<Status*>(268, context, i, out);
  }
  Status* inferred_attribute(const ShapeContext* context, const char* name, const Attribute** out) const {
    return call<Status*>(269, context, name, out);
  }
  Status* infer_output(const ShapeContext* context, size_t i, const Shape* shape) const {
    return call<Status*>(270, context, i, shape);
  }
  Status* set_names(Shape* shape, const char** names, size_t n) const { return call<Status*>(271, shape, names, n); }
  Status* read(const Attribute* attribute, int type, void* to, size_t bytes, size_t* written) const {
    return call<Status*>(272, attribute, type, to, bytes, written);
  }
};

struct ApiBase {
  const Api* (*get)(uint32_t version);
  const char* (*version)();
};

struct CustomOp {
  uint32_t version;
  void* (*create)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_least)(const CustomOp*);
  int (*variadic_input_same)(const CustomOp*);
  int (*variadic_output_least)(const CustomOp*);
  int (*variadic_output_same)(const CustomOp*);
  Status* (*create_checked)(const CustomOp*, const Api*, const KernelInfo*, void** out);
  Status* (*compute_checked)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, ShapeContext*);
  int (*first_version)(const CustomOp*);
  int (*last_version)(const CustomOp*);
  size_t (*may_share)(int**, int**);
  void (*release_may_share)(int*, int*);
  size_t (*alias)(int**, int**);
  void (*release_alias)(int*, int*);
};

}  // namespace ort
