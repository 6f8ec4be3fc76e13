// counter.c: an agent in C over the one import, tidegate.h.
//   zig cc -target wasm32-freestanding -O2 -nostdlib -Wl,--no-entry -I runtime/guests/sdk counter.c -o counter.wasm
//   tidegate agent run counter.wasm
#include "tidegate.h"

static char reply[4096];

__attribute__((export_name("run"))) int run(void) {
  static const char log[] = "{\"v\":1,\"op\":\"log\",\"args\":{\"level\":\"info\",\"message\":\"counting\",\"fields\":{}}}";
  static const char put[] = "{\"v\":1,\"op\":\"memory.put\",\"args\":{\"key\":\"count\",\"value\":41}}";
  static const char get[] = "{\"v\":1,\"op\":\"memory.get\",\"args\":{\"key\":\"count\"}}";
  static const char nap[] = "{\"v\":1,\"op\":\"sleep\",\"args\":{\"ms\":20}}";
  tidegate_call(log, sizeof log - 1, reply, sizeof reply);
  tidegate_call(put, sizeof put - 1, reply, sizeof reply);
  tidegate_call(nap, sizeof nap - 1, reply, sizeof reply);
  int length = tidegate_call(get, sizeof get - 1, reply, sizeof reply);
  int sum = 0;
  for (int i = 0; i < length; i++) sum = sum * 31 + reply[i];
  return length > 0 && length < (int)sizeof reply ? sum : -1;
}
