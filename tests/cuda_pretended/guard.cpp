// Lets a CPU build of torch run autograd on tensors of device "cuda": a guard with empty streams and events, hooks that
// report one GPU, and plain memory as pinned memory. The tensors have no storage, so no kernel ever runs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <optional>

namespace pretended {
using namespace c10;
constexpr auto CUDA = DeviceType::CUDA;

struct Guard final : impl::DeviceGuardImplInterface {
  static Stream stream() { return Stream(Stream::DEFAULT, Device(CUDA, 0)); }
  DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device) const override { return Device(CUDA, 0); }
  Device getDevice() const override { return Device(CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream given) const override { return given; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    static auto generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
}  // namespace pretended

namespace c10::impl { static DeviceGuardImplRegistrar pretended_guard(DeviceType::CUDA, new pretended::Guard()); }
namespace at { using Pretended = pretended::Hooks; C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Pretended) }

// A CPU build decides at compile time that it has no accelerator. LD_PRELOAD puts this symbol before torch's own.
namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}
