/* Stands in for libcute_dsl_runtime.so: the entry points that a compiled CuTe DSL host function calls, forwarded to
 * Python or answered here. Every emulated module links a copy. Emulated and real modules can therefore run in one
 * process, and neither sees the other's runtime. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct callbacks {
  int (*load)(void **library, const void *image);
  int (*get_kernel)(void **kernel, void *library, const char *name);
  int (*launch)(const void *config, const void *kernel, void **args);
  int (*encode)(void *map, int type, u32 rank, void *address, const u64 *dims, const u64 *strides, const u32 *box,
                const u32 *steps, int interleave, int swizzle, int l2, int oob);
  int (*device_attribute)(int attribute);
} callbacks;
static callbacks cb;
EXPORT void hopwell_emulator_connect(const callbacks *c) { cb = *c; }

EXPORT int _cuTensorMapEncodeTiled(void *m, int type, u32 rank, void *address, const u64 *dims, const u64 *strides,
                                   const u32 *box, const u32 *steps, int interleave, int swizzle, int l2, int oob) {
  return cb.encode(m, type, rank, address, dims, strides, box, steps, interleave, swizzle, l2, oob);
}
EXPORT int _cudaLaunchKernelEx(const void *config, const void *kernel, void **args) {
  return cb.launch(config, kernel, args);
}
EXPORT int _cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e,
                                unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  return cb.load(library, image);
}
EXPORT int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  return cb.get_kernel(kernel, library, name);
}
EXPORT int _cudaLibraryUnload(void *library) { (void)library; return 0; }
EXPORT int _cudaKernelSetAttributeForDevice(void *k, int attribute, int value, int device) {
  (void)k, (void)attribute, (void)value, (void)device;
  return 0;
}
EXPORT int _cudaFuncSetAttribute(void *k, int attribute, int value) { (void)k, (void)attribute, (void)value; return 0; }
EXPORT int _cudaGetDevice(int *device) { *device = 0; return 0; }
EXPORT int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
EXPORT int _cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
EXPORT int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = cb.device_attribute ? cb.device_attribute(attribute) : 0;
  return 0;
}
EXPORT int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  *value = 0;
  return 0;
}
EXPORT int _cudaDeviceSynchronize(void) { return 0; }
EXPORT int _cudaSetDevice(int device) { (void)device; return 0; }
EXPORT int _cudaStreamSynchronize(void *stream) { (void)stream; return 0; }
EXPORT int _cudaMemset(void *p, int v, size_t n) { memset(p, v, n); return 0; }
EXPORT int _cudaMemsetAsync(void *p, int v, size_t n, void *stream) { (void)stream; memset(p, v, n); return 0; }
EXPORT int _cudaMemcpy(void *d, const void *s, size_t n, int kind) { (void)kind; memcpy(d, s, n); return 0; }
EXPORT int _cudaMemcpyAsync(void *d, const void *s, size_t n, int kind, void *stream) {
  (void)kind, (void)stream;
  memcpy(d, s, n);
  return 0;
}
EXPORT const char *cuda_dialect_get_error_name(int e) { return e ? "emulator error" : "no error"; }
EXPORT void cuda_dialect_assert_success(int e) { (void)e; }
EXPORT void cuda_dialect_print_on_error(int e) { (void)e; }

/* TVM-FFI modules load their image once per process through this; the slot keeps the library handle. */
EXPORT int cuda_dialect_init_library_once(void **slot, int (*load)(void **), int (*to_device)(void **, int),
                                          void (*raise)(const char *kind, const char *message)) {
  void *library = NULL;
  if (*slot) return 0;
  if (load(&library)) {
    raise("RuntimeError", "hopwell emulator: the module could not be loaded");
    return -1;
  }
  if (to_device) to_device(&library, 0);
  *slot = library;
  return 0;
}
EXPORT int cuda_dialect_unload_library_once(void **slot, int (*unload)(void **)) {
  (void)unload;
  *slot = NULL;
  return 0;
}

/* The host side keeps the Python exception of a failed launch, and raises it when the call returns. TVM-FFI still
 * needs an error object, or it reports a missing one. */
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) __attribute__((weak));
static void raise_pending(void) {
  if (TVMFFIErrorSetRaisedFromCStr) TVMFFIErrorSetRaisedFromCStr("RuntimeError", "hopwell emulator: the launch failed");
}
EXPORT void CuteDSLRT_TVMFFISetRaisedCudaError(int code) { (void)code; raise_pending(); }
EXPORT void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(int code) { (void)code; raise_pending(); }
