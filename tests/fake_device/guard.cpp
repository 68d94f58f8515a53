// What the CPU build of torch lacks to take `cuda:0` for a device: a guard with a current stream for
// each thread, hooks that say that there is one GPU, and pinned memory. Streams are numbers here;
// what they, and the events between them, mean is said by the callbacks (fake_cuda.py).
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace {
using namespace c10;

thread_local int64_t current = 0;
int64_t (*record_event)(int64_t event, int64_t stream);
void (*block_stream)(int64_t event, int64_t stream);
int64_t (*query_event)(int64_t event);

std::mutex lock;
std::map<const char*, size_t> pinned; // blocks in use, by address
std::map<size_t, std::vector<char*>> unused; // and by size those that are not

// As torch's, it gives a block out again and never back to the system, so a late copy may still read
// it. What was freed is overwritten at once: NaN for floats, -1 for integers.
struct Pinned final : Allocator {
  static void drop(void* address) {
    char* data = static_cast<char*>(address);
    std::lock_guard<std::mutex> held(lock);
    const size_t size = pinned[data];
    std::memset(data, 0xff, size);
    pinned.erase(data);
    unused[size].push_back(data);
  }
  DataPtr allocate(size_t n) override {
    size_t size = 64;
    while (size <= n) size *= 2; // more than n: empty memory has an address too
    std::lock_guard<std::mutex> held(lock);
    auto& blocks = unused[size];
    char* data = nullptr;
    if (blocks.empty()) {
      data = static_cast<char*>(std::aligned_alloc(64, size));
    } else {
      data = blocks.back();
      blocks.pop_back();
    }
    pinned[data] = size;
    return {data, data, &drop, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} pinned_memory;

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream of(int64_t id) const { return Stream(Stream::UNSAFE, getDevice(), id); }
  Stream getStream(Device) const override { return of(current); }
  Stream getDefaultStream(Device) const override { return of(0); }
  Stream exchangeStream(Stream next) const override { return of(std::exchange(current, next.id())); }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    *event = reinterpret_cast<void*>(record_event(reinterpret_cast<int64_t>(*event), stream.id()));
  }
  void block(void* event, const Stream& stream) const override {
    block_stream(reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void* event) const override { return query_event(reinterpret_cast<int64_t>(event)); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
} // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    auto after = pinned.upper_bound(static_cast<const char*>(data));
    return after != pinned.begin() && (--after, data < after->first + after->second);
  }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at

extern "C" {
// Whether a block in use begins at `data`.
bool fake_is_pinned_block(const char* data) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.count(data) != 0;
}
int64_t fake_stream() { return current; }
void fake_set_stream(int64_t stream) { current = stream; }
void fake_callbacks(decltype(record_event) r, decltype(block_stream) b, decltype(query_event) q) {
  record_event = r, block_stream = b, query_event = q;
}
}
