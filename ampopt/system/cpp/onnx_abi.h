// What an operator of ours needs of ONNX Runtime's C interface, whose headers its wheels do not bring.
//
// That interface is a table of functions to which every version only appends, so a function is known by its
// place: see onnxruntime_c_api.h of any version, `struct OrtApi`, and `struct OrtCustomOp` for `CustomOp`.
#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace ort {

struct Status;
struct Value;
struct Info;
struct Context;
struct ShapeInfo;
struct SessionOptions;
struct Domain;
struct CustomOp;

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

inline constexpr uint32_t kApiVersion = 17;    // the first with every function below
inline const void* const* functions = nullptr;  // set when the operators are registered

// The function at a place of the table.
template <int Place, class Result, class... Arguments>
struct Function {
  Result operator()(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(const_cast<void*>(functions[Place]))(arguments...);
  }
};

inline constexpr Function<0, Status*, int, const char*> create_status;
inline constexpr Function<2, const char*, const Status*> error_message;
inline constexpr Function<26, Status*, const char*, Domain**> create_domain;
inline constexpr Function<27, Status*, Domain*, const CustomOp*> add_to_domain;
inline constexpr Function<28, Status*, SessionOptions*, Domain*> add_domain;
inline constexpr Function<51, Status*, Value*, void**> tensor_data;
inline constexpr Function<61, Status*, const ShapeInfo*, size_t*> count_dimensions;
inline constexpr Function<62, Status*, const ShapeInfo*, int64_t*, size_t> dimensions;
inline constexpr Function<65, Status*, const Value*, ShapeInfo**> shape_info;
inline constexpr Function<85, Status*, const Info*, const char*, float*> float_attribute;
inline constexpr Function<86, Status*, const Info*, const char*, int64_t*> integer_attribute;
inline constexpr Function<90, Status*, const Context*, size_t, const Value**> get_input;
inline constexpr Function<91, Status*, Context*, size_t, const int64_t*, size_t, Value**> get_output;
inline constexpr Function<93, void, Status*> release_status;
inline constexpr Function<99, void, ShapeInfo*> release_shape_info;
inline constexpr Function<274, Status*, const Context*, void (*)(void*, size_t), size_t, size_t, void*>
    parallel_for;

enum { kFloat = 1 };                   // a type of elements
enum { kRequired = 0, kOptional = 1 };  // kinds of inputs
enum { kFail = 1 };                    // a kind of error

// An operator on floats with one result, as ONNX Runtime wants to be told of one (version 16).
struct CustomOp {
  uint32_t version = 16;
  void* (*create)(const CustomOp*, const void*, const Info*) = nullptr;
  const char* (*name)(const CustomOp*) = nullptr;
  const char* (*provider)(const CustomOp*) = [](const CustomOp*) -> const char* { return nullptr; };
  int (*input_type)(const CustomOp*, size_t) = [](const CustomOp*, size_t) -> int { return kFloat; };
  size_t (*input_count)(const CustomOp*) = nullptr;
  int (*output_type)(const CustomOp*, size_t) = [](const CustomOp*, size_t) -> int { return kFloat; };
  size_t (*output_count)(const CustomOp*) = [](const CustomOp*) -> size_t { return 1; };
  void (*compute)(void*, Context*) = nullptr;
  void (*destroy)(void*) = nullptr;
  int (*input_kind)(const CustomOp*, size_t) = nullptr;
  int (*output_kind)(const CustomOp*, size_t) = [](const CustomOp*, size_t) -> int { return kRequired; };
  int (*input_memory)(const CustomOp*, size_t) = [](const CustomOp*, size_t) -> int { return 0; };
  int (*variadic[4])(const CustomOp*) = {};
  Status* (*create_or_say)(const CustomOp*, const void*, const Info*, void**) = nullptr;
  Status* (*compute_or_say)(void*, Context*) = nullptr;
};

// Raises what a function says.
inline void check(Status* status) {
  if (status == nullptr) return;
  const std::string message = error_message(status);
  release_status(status);
  throw std::runtime_error(message);
}

// Runs a function; what it raises becomes a status.
template <class Work>
Status* said(Work&& work) noexcept {
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    return create_status(kFail, error.what());
  }
}

// An attribute of a node.
inline int64_t integer(const Info* info, const char* name) {
  int64_t value = 0;
  check(integer_attribute(info, name, &value));
  return value;
}
inline float number(const Info* info, const char* name) {
  float value = 0;
  check(float_attribute(info, name, &value));
  return value;
}

struct Tensor {
  float* data = nullptr;
  std::vector<int64_t> shape;
};

// Input `index`; without data where a node leaves it out.
inline Tensor input(const Context* context, size_t index) {
  const Value* value = nullptr;
  check(get_input(context, index, &value));
  if (value == nullptr) return {};
  Tensor tensor;
  ShapeInfo* info = nullptr;
  size_t count = 0;
  check(shape_info(value, &info));
  check(count_dimensions(info, &count));
  tensor.shape.resize(count);
  check(dimensions(info, tensor.shape.data(), count));
  release_shape_info(info);
  check(tensor_data(const_cast<Value*>(value), reinterpret_cast<void**>(&tensor.data)));
  return tensor;
}

// The memory of the output.
inline float* output(Context* context, const std::vector<int64_t>& shape) {
  Value* value = nullptr;
  void* data = nullptr;
  check(get_output(context, 0, shape.data(), shape.size(), &value));
  check(tensor_data(value, &data));
  return static_cast<float*>(data);
}

// work(index) for every index below `count`, on the threads of the session. `work` must not throw.
template <class Work>
void parallel(const Context* context, size_t count, Work&& work) {
  const auto one = [](void* of, size_t index) noexcept { (*static_cast<Work*>(of))(index); };
  check(parallel_for(context, one, count, 0, &work));
}

// A class with a constructor from `const Info*` and `void compute(Context*) const` as an operator, whose
// inputs from number `Needed` on may be left out.
template <class Kernel, size_t Inputs, size_t Needed>
struct Operator : CustomOp {
  const char* called;
  explicit Operator(const char* its_name) : called(its_name) {
    name = [](const CustomOp* op) { return static_cast<const Operator*>(op)->called; };
    input_count = [](const CustomOp*) { return Inputs; };
    input_kind = [](const CustomOp*, size_t index) -> int { return index < Needed ? kRequired : kOptional; };
    create_or_say = [](const CustomOp*, const void*, const Info* info, void** kernel) {
      return said([&] { *kernel = new Kernel(info); });
    };
    compute_or_say = [](void* kernel, Context* context) {
      return said([&] { static_cast<const Kernel*>(kernel)->compute(context); });
    };
    destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }
};

// Puts operators, which live as long as the library, into the options of a session under a domain's name.
inline Status* add(SessionOptions* options, const ApiBase* base, const char* name,
                   std::initializer_list<const CustomOp*> operators) {
  static Domain* domain = nullptr;
  functions = base->get_api(kApiVersion);
  if (functions == nullptr) std::terminate();  // ruled out by the version that Python asks for
  return said([&] {
    if (domain == nullptr) {
      check(create_domain(name, &domain));
      for (const CustomOp* each : operators) check(add_to_domain(domain, each));
    }
    check(add_domain(options, domain));
  });
}

}  // namespace ort
