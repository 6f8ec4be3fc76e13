-- The place of the one probe that a breaker of the fleet lets through (docs/adr/0061).
--
-- KEYS[1] is a hash: `by` the token of who has the place ('' nobody), `ends` when it is free in any
-- case, in milliseconds of the store's clock, `good` the good probes in a row. The name before this
-- text is the function's own (see script.py).

local function take(key, token, lasts, kept)
  local at = redis.call('TIME')
  local now = at[1] * 1000 + math.floor(at[2] / 1000)
  local found = redis.call('HMGET', key, 'by', 'ends', 'good')
  local left = (tonumber(found[2]) or 0) - now
  if left > 0 and found[1] ~= token then return {0, left} end
  redis.call('HSET', key, 'by', token, 'ends', string.format('%.0f', now + lasts))
  redis.call('PEXPIRE', key, kept)
  return {1, tonumber(found[3]) or 0}
end

-- Only its holder frees a place, also after its end if nobody else has taken it since. A place that
-- rests is nobody's and cannot be taken: the news of an opened or closed breaker is on its way.
local function free(key, token, good, rest, kept, channel, news)
  if redis.call('HGET', key, 'by') ~= token then return {0, 0} end
  local ends = 0
  if rest > 0 then
    local at = redis.call('TIME')
    ends = at[1] * 1000 + math.floor(at[2] / 1000) + rest
  end
  redis.call('HSET', key, 'by', '', 'ends', string.format('%.0f', ends))
  if good ~= '' then redis.call('HSET', key, 'good', good) end
  redis.call('PEXPIRE', key, kept)
  if rest == 0 then redis.call('PUBLISH', channel, news) end
  return {1, 0}
end

redis.register_function(NAME, function(keys, args)
  local key, what = keys[1], args[1]
  if what == 'take' then return take(key, args[2], tonumber(args[3]), tonumber(args[4])) end
  if what == 'free' then
    return free(key, args[2], args[3], tonumber(args[4]), tonumber(args[5]), args[6], args[7])
  end
  redis.call('HDEL', key, 'good')  -- 'void': a phase is over, and its good probes count no more
  return {1, 0}
end)
