// A CUDA device that is not there: tensors of `cuda:0` whose memory is the host's and whose kernels are those of the CPU.
//
// Everything above the kernels is PyTorch's own: dispatch, autocast, autograd's threads, streams and events, pinned
// memory, and the code that asks for a tensor's device. What a kernel would have launched, copied or waited for is told
// to a listener (`simulated_listen`). Streams keep vector clocks (Lamport 1978; Mattern 1989): an operator that reads
// what another stream has written, or writes what it has read, without an event between them is told as a race.
//
// Compiled and loaded by benchmarks/simulated_cuda.py, before anything has asked PyTorch for an accelerator.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

const c10::Device kDevice(c10::kCUDA, 0);
using Listener = void (*)(const char* kind, const char* what, int64_t size_bytes);
Listener listener = nullptr;

// Never called with `guard` held: the listener is Python's, and who has Python's lock may free memory, which takes `guard`.
void tell(const char* kind, const std::string& what, int64_t size_bytes = 0) {
  if (listener != nullptr) listener(kind, what.c_str(), size_bytes);
}

// Streams, events, and what happens before what.

using Clock = std::map<c10::StreamId, int64_t>;
constexpr c10::StreamId kHost = -1;
std::recursive_mutex guard;
std::map<c10::StreamId, Clock> clocks;  // of each stream, and of the host
thread_local c10::StreamId current = 0;
c10::StreamId streams = 0;

struct Event {
  Clock clock;
};

struct Access {
  c10::StreamId stream = 0;
  int64_t tick = 0;
  std::string op;
};

struct Accesses {
  Access write;
  std::map<c10::StreamId, Access> reads;
};
std::map<const void*, Accesses> memory;  // by the first address of a storage

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, tick] : other) into[stream] = std::max(into[stream], tick);
}

bool before(const Access& access, const Clock& clock) {
  auto found = clock.find(access.stream);
  return access.tick == 0 || (found != clock.end() && found->second >= access.tick);
}

std::string race(const Access& earlier, const std::string& op, const char* how) {
  return op + " " + how + " " + earlier.op + " on another stream";
}

// One operator on the current stream (or, of the host's memory, by the host); the races that it has.
std::vector<std::string> accounted(const std::string& op, const std::set<const void*>& reads, const std::set<const void*>& writes, c10::StreamId by) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  std::vector<std::string> races;
  Clock& clock = clocks[by];
  if (by != kHost) merge(clock, clocks[kHost]);
  const int64_t tick = ++clock[by];
  for (const void* at : reads) {
    Accesses& one = memory[at];
    if (!before(one.write, clock)) races.push_back(race(one.write, op, "reads what was written by"));
    one.reads[by] = Access{by, tick, op};
  }
  for (const void* at : writes) {
    Accesses& one = memory[at];
    if (!before(one.write, clock)) races.push_back(race(one.write, op, "writes what was written by"));
    for (const auto& [stream, access] : one.reads)
      if (!before(access, clock)) races.push_back(race(access, op, "writes what was read by"));
    one.reads.clear();
    one.write = Access{by, tick, op};
  }
  return races;
}

void account(const std::string& op, const std::set<const void*>& reads, const std::set<const void*>& writes, c10::StreamId by) {
  for (const std::string& one : accounted(op, reads, writes, by)) tell("race", one);
}

void forget(const void* at) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  memory.erase(at);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    return stream(++streams);
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, to.id())); }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (*event == nullptr) *event = new Event();
    merge(clocks[on.id()], clocks[kHost]);
    static_cast<Event*>(*event)->clock = clocks[on.id()];
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (event != nullptr) merge(clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    synchronizeEventQuietly(event);
    return true;
  }
  void synchronizeEventQuietly(void* event) const {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (event != nullptr) merge(clocks[kHost], static_cast<Event*>(event)->clock);
  }
  // Behind an event the host may have launched more, which the device does while the host waits; else it runs dry.
  bool behindAll(void* event) const {
    std::lock_guard<std::recursive_mutex> lock(guard);
    const int64_t last = clocks[0][0];
    return event != nullptr && last > 0 && static_cast<Event*>(event)->clock[0] >= last;
  }
  void synchronizeEvent(void* event) const override {
    if (behindAll(event)) tell("synchronization", "an event, behind which nothing is launched");
    else tell("event", "synchronize");
    synchronizeEventQuietly(event);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { synchronized("stream.synchronize", stream.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    tell("synchronization", "device.synchronize");
    std::lock_guard<std::recursive_mutex> lock(guard);
    for (const auto& [stream, clock] : std::map(clocks)) merge(clocks[kHost], clock);
  }
  void synchronized(const std::string& what, c10::StreamId stream) const {
    tell("synchronization", what);
    std::lock_guard<std::recursive_mutex> lock(guard);
    merge(clocks[kHost], clocks[stream]);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
const Guard kGuard;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// Pinned memory: the host's, by address.

std::map<const char*, size_t> pinned;

void unpin(void* at) {
  {
    std::lock_guard<std::recursive_mutex> lock(guard);
    pinned.erase(static_cast<const char*>(at));
    forget(at);
  }
  std::free(at);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size_bytes) override {
    void* at = std::aligned_alloc(64, (size_bytes + 64) / 64 * 64);
    std::lock_guard<std::recursive_mutex> lock(guard);
    pinned[static_cast<const char*>(at)] = size_bytes;
    return {at, at, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size_bytes) const override { std::memcpy(to, from, size_bytes); }
};

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  const auto& [at, size_bytes] = *--next;
  return static_cast<const char*>(data) < at + std::max<size_t>(1, size_bytes);
}

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override {
    static Pinned allocator;
    return &allocator;
  }
  void deviceSynchronize(DeviceIndex index) const override { kGuard.synchronizeDevice(index); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace {

// Operators: the same memory as tensors of the CPU, and what they give as tensors of the device again.

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // of the device, and the same memory on the host
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  std::vector<at::Tensor> others;  // of the host
  bool in_list_of_device = false;
};

c10::Storage twin(Call& call, const c10::Storage& storage) {
  for (const auto& [own, other] : call.storages)
    if (own.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return other;
  void* at = const_cast<void*>(storage.data());
  c10::DataPtr data(at, nullptr, [](void*) {}, c10::Device(c10::kCPU));
  c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  call.storages.emplace_back(storage, made);
  return made;
}

at::Tensor shaped(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

at::Tensor on_host(Call& call, const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) {
    call.others.push_back(tensor);
    return tensor;
  }
  for (const auto& [own, other] : call.tensors)
    if (own.is_same(tensor)) return other;
  call.tensors.emplace_back(tensor, shaped(twin(call, tensor.storage()), c10::DispatchKey::CPU, tensor));
  return call.tensors.back().second;
}

void release(void* storage) {
  auto* own = static_cast<c10::Storage*>(storage);
  forget(own->data());
  delete own;
}

c10::DataPtr adopted(const c10::Storage& host) {
  return {const_cast<void*>(host.data()), new c10::Storage(host), &release, kDevice};
}

at::Tensor on_device(const Call& call, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  for (const auto& [own, other] : call.tensors)
    if (other.is_same(tensor)) return own;
  for (const auto& other : call.others)
    if (other.is_same(tensor)) return tensor;
  for (const auto& [own, other] : call.storages)
    if (other.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) return shaped(own, c10::DispatchKey::CUDA, tensor);
  c10::Storage made(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), adopted(tensor.storage()), nullptr, false);
  return shaped(std::move(made), c10::DispatchKey::CUDA, tensor);
}

template <typename Each>
c10::IValue mapped(const c10::IValue& value, const Each& each) {
  if (value.isTensor()) return each(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> found;
    for (const at::Tensor& one : value.toTensorVector()) found.push_back(each(one));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const auto& one : value.toOptionalTensorList()) {
      std::optional<at::Tensor> own = one;
      found.push_back(own.has_value() ? std::optional<at::Tensor>(each(*own)) : std::nullopt);
    }
    return found;
  }
  return value;
}

// What a storage that an operator has made larger, or a tensor whose shape it has set, looks like on the device.
void bring_back(const Call& call) {
  for (const auto& [own, other] : call.storages)
    if (own.data() != other.data()) {
      own.unsafeGetStorageImpl()->set_data_ptr_noswap(adopted(other));
      own.unsafeGetStorageImpl()->set_nbytes(other.nbytes());
    }
  for (const auto& [own, other] : call.tensors)
    if (own.sizes() != other.sizes() || own.strides() != other.strides()) {
      own.unsafeGetTensorImpl()->set_storage_offset(other.storage_offset());
      own.unsafeGetTensorImpl()->set_sizes_and_strides(other.sizes(), other.strides());
    }
}

// Operators whose result has a shape or value that the host has to wait for.
const std::set<std::string> kWaits{"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::histc", "aten::is_nonzero"};
// Operators that launch nothing.
const std::set<std::string> kQuiet{"aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to",
    "aten::_fused_sdp_choice"};
const std::set<std::string> kIndexed{"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::_unsafe_index", "aten::index_put"};

void check_devices(const Call& call, const c10::OperatorHandle& op, const std::string& name) {
  if (call.tensors.empty() || name == "aten::copy_") return;
  const bool lists = name.rfind("aten::_foreach", 0) == 0 || name.rfind("aten::_fused", 0) == 0;
  for (const at::Tensor& other : call.others) {
    if (other.dim() == 0 && !lists) continue;
    if (kIndexed.count(name)) {
      tell("copy to the device", "indices of " + name, other.nbytes());
      tell("synchronization", "indices of " + name + " lie on the host");
      continue;
    }
    TORCH_CHECK(false, name, " of tensors on cuda:0 and, of shape ", other.sizes(), ", on the CPU");
  }
}

void account_for(const Call& call, const c10::OperatorHandle& op, const std::string& name, const torch::jit::Stack& given, bool launched) {
  std::set<const void*> reads, writes;
  const auto& arguments = op.schema().arguments();
  for (size_t number = 0; number < arguments.size(); ++number) {
    const auto* alias = arguments[number].alias_info();
    auto& into = alias != nullptr && alias->isWrite() ? writes : reads;
    mapped(given[number], [&](const at::Tensor& tensor) {
      const bool has_memory = tensor.defined() && tensor.numel() && tensor.has_storage();
      // A kernel gets a number of the host by value, and what is pageable is copied before the host goes on.
      if (has_memory && (tensor.is_cuda() || is_pinned(tensor.storage().data()))) into.insert(tensor.storage().data());
      return tensor;
    });
  }
  if (launched) account(name, reads, writes, current);
}

void copies(const torch::jit::Stack& given) {
  const at::Tensor &to = given[0].toTensor(), &from = given[1].toTensor();
  const bool blocking = given.size() < 3 || !given[2].toBool();
  if (to.is_cuda() && from.is_cuda()) return tell("launch", "aten::copy_", to.nbytes());
  const at::Tensor& host = to.is_cuda() ? from : to;
  const char* kind = to.is_cuda() ? "copy to the device" : "copy to the host";
  const bool fixed = host.numel() == 0 || is_pinned(host.storage().data());
  tell(kind, fixed ? "pinned" : "pageable", host.nbytes());
  if (blocking || (!fixed && !to.is_cuda())) kGuard.synchronized(std::string("blocking ") + kind, current);
}

void simulate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t number = op.schema().arguments().size(), begin = stack->size() - number;
  const std::string name = op.schema().name();
  const torch::jit::Stack given(stack->begin() + begin, stack->end());
  Call call;
  for (size_t at = begin; at < stack->size(); ++at) {
    c10::IValue& value = (*stack)[at];
    if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::kCPU);
    else value = mapped(value, [&](const at::Tensor& tensor) { return on_host(call, tensor); });
  }
  check_devices(call, op, name);
  bool views = !op.schema().returns().empty();
  for (const auto& result : op.schema().returns()) views &= result.alias_info() != nullptr && !result.alias_info()->isWrite();
  const bool launched = !views && !kQuiet.count(name);
  account_for(call, op, name, given, launched);
  if (name == "aten::copy_") copies(given);
  else if (kWaits.count(name)) kGuard.synchronized(name, current);
  else if (launched) tell("launch", name);
  if (kIndexed.count(name))
    for (const auto& one : given[1].toOptionalTensorList()) {
      std::optional<at::Tensor> indices = one;
      if (indices.has_value() && indices->scalar_type() == at::kBool) kGuard.synchronized(name + " by a mask", current);
    }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  bring_back(call);
  for (size_t at = begin; at < stack->size(); ++at)
    (*stack)[at] = mapped((*stack)[at], [&](const at::Tensor& tensor) { return on_device(call, tensor); });
}

// What the CPU has under another name, or not for halves.

at::Tensor host(Call& call, const at::Tensor& tensor) { return on_host(call, tensor); }

at::Tensor log_softmax(const at::Tensor& x, int64_t dim, bool widens) {
  tell("launch", "aten::_log_softmax");
  account("aten::_log_softmax", {x.storage().data()}, {}, current);
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  auto own = host(call, x);
  return on_device({}, at::_log_softmax(widens ? own.to(at::kFloat) : own, dim, false));
}

int64_t choice(const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
               double dropout, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  return half && dropout == 0.0 && !(mask.has_value() && mask->defined()) ? 1 : 0;  // flash, or by products
}

using Flash = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

Flash flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout, bool causal, bool, std::optional<double> scale) {
  tell("launch", "aten::_scaled_dot_product_flash_attention");
  account("aten::_scaled_dot_product_flash_attention", {query.storage().data(), key.storage().data(), value.storage().data()}, {}, current);
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(host(call, query), host(call, key), host(call, value), dropout, causal, {}, scale);
  auto seed = on_device({}, at::empty({2}, at::kLong));
  return {on_device({}, out), on_device({}, lse), at::Tensor(), at::Tensor(), query.size(2), key.size(2), seed, on_device({}, at::empty({0}, at::kLong)), at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& brought, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
    const at::Tensor& lse, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const at::Tensor&, const at::Tensor&, std::optional<double> scale) {
  tell("launch", "aten::_scaled_dot_product_flash_attention_backward");
  account("aten::_scaled_dot_product_flash_attention_backward", {brought.storage().data(), query.storage().data(), out.storage().data()}, {}, current);
  Call call;
  at::AutoDispatchBelowADInplaceOrView below;
  auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host(call, brought), host(call, query), host(call, key), host(call, value), host(call, out), host(call, lse), dropout, causal, {}, scale);
  return {on_device({}, q), on_device({}, k), on_device({}, v)};
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulate>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&simulate>());
  m.impl("record_stream", &record_stream);
  m.impl("_log_softmax", &log_softmax);
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice);
}

std::vector<std::unique_ptr<torch::Library>> libraries;

at::Tensor memory_on_host(const at::Tensor& tensor) {
  Call call;
  auto found = on_host(call, tensor);
  return found;
}

// What a collective reads and writes in its stream.
void collective(at::TensorList read, at::TensorList written, std::string name) {
  std::set<const void*> reads, writes;
  for (const auto& tensor : read) reads.insert(tensor.storage().data());
  for (const auto& tensor : written) writes.insert(tensor.storage().data());
  tell("collective", name);
  account(name, reads, writes, current);
}

// What `UntypedStorage.resize_` does on CUDA.
void resize_storage(c10::Storage storage, int64_t size_bytes) {
  auto made = at::empty({size_bytes}, at::kByte).storage();
  const size_t kept = std::min<size_t>(size_bytes, storage.nbytes());
  if (kept) std::memcpy(made.mutable_data(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(adopted(made));
  storage.unsafeGetStorageImpl()->set_nbytes(size_bytes);
}

TORCH_LIBRARY(simulated_cuda, m) {
  m.def("resize_storage(Storage storage, int size_bytes) -> ()", &resize_storage);
  m.def("on_host(Tensor(a) tensor) -> Tensor(a)");
  m.def("collective(Tensor[] read, Tensor(a!)[] written, str name) -> ()");
}
TORCH_LIBRARY_IMPL(simulated_cuda, CUDA, m) {
  m.impl("on_host", &memory_on_host);
  m.impl("collective", &collective);
}

}  // namespace

extern "C" void simulated_listen(Listener to) { listener = to; }

// Operators that have a kernel of CUDA and, for other devices, one of other operators: they are one here, too.
extern "C" void simulated_kernel(const char* name) {
  libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__));
  libraries.back()->impl(name, torch::CppFunction::makeFromBoxedFunction<&simulate>());
}
