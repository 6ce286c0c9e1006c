/* A driver library of two GPUs for the real bindings to talk to: GPU 0 answers, GPU 1 is lost after
   its name. What is missing here is "function not found" for the bindings. */
#include <stdio.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
enum { OK = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, LOST = 15 };

static int gpus[2];
static int number(void *device) { return (int)((int *)device - gpus); }

struct memory_v2 { u32 version; u64 total, reserved, free, used; };
struct memory { u64 total, free, used; };
struct violation { u64 reference, nanoseconds; };
struct process { u32 pid; u64 used; u32 gpu_instance, compute_instance; };
struct pci { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; };
struct field { u32 id, scope; long long stamp, latency; int type, status; union { u64 ull; double d; } v; };
struct rates { u32 gpu, memory; };

static u64 asked;

int nvmlInitWithFlags(u32 flags) { (void)flags; return OK; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "Not Supported"; }
int nvmlSystemGetDriverVersion(char *out, u32 n) { snprintf(out, n, "550.90.07"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 12040; return OK; }
int nvmlDeviceGetCount_v2(u32 *out) { *out = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 i, void **out) { *out = &gpus[i]; return OK; }
int nvmlDeviceGetUUID(void *d, char *out, u32 n) {
    snprintf(out, n, "GPU-%08x-0000-4000-8000-000000000000", number(d)); return OK; }
int nvmlDeviceGetName(void *d, char *out, u32 n) { (void)d; snprintf(out, n, "NVIDIA L4"); return OK; }
int nvmlDeviceGetPciInfo_v3(void *d, struct pci *out) {
    if (number(d)) return LOST;
    memset(out, 0, sizeof *out); out->bus = 0x3b; strcpy(out->bus_id, "00000000:3B:00.0"); return OK; }
int nvmlDeviceGetVbiosVersion(void *d, char *out, u32 n) {
    (void)d; asked++; snprintf(out, n, "95.04.%02llu", asked); return OK; }
int nvmlDeviceGetMemoryInfo_v2(void *d, struct memory_v2 *out) {
    (void)d;
    if (out->version != 0x02000028) return 25;
    out->total = 23034ULL << 20; out->reserved = 463ULL << 20; out->used = 1ULL << 20;
    out->free = out->total - out->reserved - out->used; return OK; }
int nvmlDeviceGetMemoryInfo(void *d, struct memory *out) {
    (void)d; out->total = 23034ULL << 20; out->used = 464ULL << 20; out->free = out->total - out->used;
    return OK; }
int nvmlDeviceGetViolationStatus(void *d, u32 policy, struct violation *out) {
    (void)d;
    if (policy == 1) return NOT_SUPPORTED;
    out->reference = 5; out->nanoseconds = policy == 0 ? 7500000000ULL : 0; return OK; }
int nvmlDeviceGetFieldValues(void *d, int n, struct field *f) {
    (void)d;
    for (int i = 0; i < n; i++) {
        f[i].type = 3; f[i].status = f[i].id == 75 ? OK : NOT_SUPPORTED; f[i].v.ull = 1250000000ULL; }
    return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, u32 *n, struct process *out) {
    (void)d;
    if (*n < 3) { *n = 3; return INSUFFICIENT_SIZE; }
    *n = 3;
    out[0] = (struct process){31337, 2ULL << 30, ~0u, ~0u};
    out[1] = (struct process){31338, ~0ULL, ~0u, ~0u};
    out[2] = (struct process){~0u, 5, ~0u, ~0u};
    return OK; }
int nvmlDeviceGetRemappedRows(void *d, u32 *c, u32 *u, u32 *p, u32 *f) {
    (void)d; *c = 2; *u = 1; *p = 1; *f = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(void *d, u32 kind, u32 counter, u64 *out) {
    (void)d; *out = 10 * kind + counter; return OK; }
int nvmlDeviceGetPowerManagementLimitConstraints(void *d, u32 *low, u32 *high) {
    (void)d; *low = 40000; *high = 72000; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *d, u32 *out) { (void)d; *out = 60000; return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, u32 *out) { (void)d; *out = 72000; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, u64 *out) { (void)d; *out = 4; return OK; }
int nvmlDeviceGetClockInfo(void *d, u32 kind, u32 *out) { (void)d; *out = 1000 + kind; return OK; }
int nvmlDeviceGetMaxClockInfo(void *d, u32 kind, u32 *out) { (void)d; *out = 2000 + kind; return OK; }
int nvmlDeviceGetTemperature(void *d, u32 sensor, u32 *out) { (void)d; *out = 44 + sensor; return OK; }
int nvmlDeviceGetUtilizationRates(void *d, struct rates *out) { (void)d; out->gpu = 0; out->memory = 0; return OK; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) { (void)d; *major = 8; *minor = 9; return OK; }
int nvmlDeviceGetEccMode(void *d, u32 *now, u32 *next) { (void)d; *now = 1; *next = 0; return OK; }
int nvmlDeviceGetMigMode(void *d, u32 *now, u32 *next) { (void)d; *now = 0; *next = 1; return OK; }
