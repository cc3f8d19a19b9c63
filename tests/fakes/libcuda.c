/* A stand-in for libcuda.so.1 that runs nothing and remembers what it was asked to launch.
 *
 * Every entry point that is not written out below succeeds and does nothing. A launch keeps grid,
 * block, stream and the first KEPT parameters, 8 bytes each, for `fake_launch` to hand out. Streams
 * whose handle is CAPTURING report that they are in graph capture. */

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define KEPT 32
#define CAPTURING 0xC0FFEE00UL

typedef struct {
    uint64_t launches, grid[3], block[3], shared, stream, function, num_params, params[KEPT];
} launch_t;

static launch_t last = {.num_params = 0};
static uint64_t libraries, compute_capability = 90;

/* How many parameters the next launches have: a real driver knows it from the kernel. */
EXPORT void fake_expect(uint64_t num_params, uint64_t cc) {
    last.num_params = num_params < KEPT ? num_params : KEPT;
    compute_capability = cc;
}
EXPORT launch_t *fake_launch(void) { return &last; }
EXPORT uint64_t fake_libraries(void) { return libraries; }

static int ok(void) { return 0; }
static int give_version(int *version) { *version = 12090; return 0; }
static int give_count(int *count) { *count = 2; return 0; }
static int give_device(int *device, int ordinal) { *device = ordinal; return 0; }
static int give_zero(int *device) { *device = 0; return 0; }
static int give_attribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75   ? (int)(compute_capability / 10)
             : attribute == 76 ? (int)(compute_capability % 10)
             : attribute == 1  ? 1024
                               : 65535;
    return 0;
}
static int give_name(char *name, int length, int device) {
    (void)device;
    strncpy(name, "fake", (size_t)length);
    return 0;
}
static int give_handle(void **handle) { *handle = (void *)0x1000; return 0; }
static int give_retained(void **handle, int device) { (void)device; *handle = (void *)0x1000; return 0; }
static int give_library(void **library) { *library = (void *)(0x2000 + ++libraries); return 0; }
static int give_kernel(void **kernel, void *library, const char *name) {
    (void)name;
    *kernel = (char *)library + 0x1000;
    return 0;
}
static int give_capturing(uint64_t stream, int *status) {
    *status = (stream & ~0xFFUL) == CAPTURING;
    return 0;
}

static int record(const unsigned *config, void *function, void **params) {
    last.launches++;
    for (int i = 0; i < 3; i++) {
        last.grid[i] = config[i];
        last.block[i] = config[3 + i];
    }
    last.shared = config[6];
    memcpy(&last.stream, config + 8, 8);
    last.function = (uint64_t)(uintptr_t)function;
    for (uint64_t i = 0; i < last.num_params; i++) {
        if (params) memcpy(&last.params[i], params[i], 8);
    }
    return 0;
}
static int launch_ex(const unsigned *config, void *function, void **params, void **extra) {
    (void)extra;
    return record(config, function, params);
}
static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    (void)extra;
    unsigned config[10] = {gx, gy, gz, bx, by, bz, shared, 0};
    memcpy(config + 8, &stream, 8);
    return record(config, function, params);
}

static int get_proc(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } table[] = {
        {"cuDriverGetVersion", (void *)give_version},
        {"cuDeviceGetCount", (void *)give_count},
        {"cuDeviceGet", (void *)give_device},
        {"cuDeviceGetAttribute", (void *)give_attribute},
        {"cuDeviceGetName", (void *)give_name},
        {"cuCtxGetCurrent", (void *)give_handle},
        {"cuCtxGetDevice", (void *)give_zero},
        {"cuDevicePrimaryCtxRetain", (void *)give_retained},
        {"cuLibraryLoadData", (void *)give_library},
        {"cuLibraryGetKernel", (void *)give_kernel},
        {"cuModuleLoadDataEx", (void *)give_library},
        {"cuModuleGetFunction", (void *)give_kernel},
        {"cuStreamIsCapturing", (void *)give_capturing},
        {"cuLaunchKernelEx", (void *)launch_ex},
        {"cuLaunchKernel", (void *)launch},
    };
    (void)version; (void)flags;
    if (status) *status = 0;
    *function = (void *)ok;
    if (!strncmp(symbol, "cuGetProcAddress", 16)) *function = (void *)get_proc;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (!strcmp(symbol, table[i].name)) *function = table[i].function;
    }
    return 0;
}
EXPORT int cuGetProcAddress_v2(const char *s, void **f, int v, uint64_t g, int *st) {
    return get_proc(s, f, v, g, st);
}
EXPORT int cuGetProcAddress(const char *s, void **f, int v, uint64_t g) {
    return get_proc(s, f, v, g, 0);
}
EXPORT int cuInit(unsigned flags) { (void)flags; return 0; }
EXPORT int cuDriverGetVersion(int *version) { return give_version(version); }
