// counter.zig: the agent of counter.c in Zig.
//   zig build-exe counter.zig -target wasm32-freestanding -O ReleaseSmall -fno-entry -rdynamic
extern "agent" fn host_call(request: [*]const u8, length: u32, reply: [*]u8, capacity: u32) i32;

var reply: [4096]u8 = undefined;

fn call(request: []const u8) i32 {
    return host_call(request.ptr, @intCast(request.len), &reply, reply.len);
}

export fn run() i32 {
    _ = call("{\"v\":1,\"op\":\"memory.put\",\"args\":{\"key\":\"count\",\"value\":41}}");
    _ = call("{\"v\":1,\"op\":\"sleep\",\"args\":{\"ms\":20}}");
    const length = call("{\"v\":1,\"op\":\"memory.get\",\"args\":{\"key\":\"count\"}}");
    var sum: u32 = 0;
    for (reply[0..@intCast(@max(0, length))]) |byte| sum = sum *% 31 +% byte;
    return @bitCast(sum);
}
