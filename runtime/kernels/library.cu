// The library of operators that ONNX Runtime loads: domain onnx_mtp.
#include "cached_attention_op.cuh"
#include "gdn_rows_op.cuh"
#include "matmul_w4_op.cuh"

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::Session* options, const ort::ApiBase* base) {
  api = base->get(ort::kVersion);
  if (!api) {
    const ort::Api* oldest = base->get(1);
    return oldest->make_status(ort::kFail, (std::string("onnx_mtp needs version 17 of ONNX Runtime's C API; this is ONNX Runtime ") +
                                            base->version() + ": upgrade it").c_str());
  }
  static const Op ops[] = {matmul_w4::make_op(ort::kFloat16), matmul_w4::make_op(ort::kBfloat16), gdn_rows::make_op(ort::kFloat16),
                           gdn_rows::make_op(ort::kBfloat16), cached_attention::make_op(ort::kFloat16),
                           cached_attention::make_op(ort::kBfloat16)};
  static ort::Domain* domain = nullptr;  // sessions keep a pointer to it
  if (!domain) {
    ort::Domain* made;
    TRY(api->create_domain("onnx_mtp", &made));
    for (const Op& op : ops) TRY(api->add_op(made, &op));
    domain = made;
  }
  return api->add_domain(options, domain);
}
