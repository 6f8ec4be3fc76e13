-- The pool core as one call of a Redis function: the twin of core.py, meter.py, line.py, seats.py, leases.py,
-- slots.py, periods.py and generations.py, bit for bit (docs/adr/0039). The Python modules say why;
-- here stands only what Redis adds. One call is one `tick`; its order is core.py's.
--
-- A function and not a script: its library is set up once, where EVALSHA would make these hundred
-- closures anew in every call (half of its time), and it may remember: the compiled rules of a pool,
-- and the numbers that it wrote last, if the stored bytes are still those.
--
-- NAME is set by whoever loads this file; it names its content, so that two releases do not meet.
--
-- keys[1]  base of the pool's keys, with its hash tag; all others are that name and a suffix:
--   :st string  numbers of the state, and what is young (below)
--   :cf string  revision, digest, compiled rules
--   :lg<W> string  ring of log cells    :sh hash    id of a list of dimensions -> what they meter
--   :q<lane> zset  tag -> waiter        :rq hash    rid -> waiter      :qt hash  lane|tenant -> queued
--   :fl<lane> zset finish -> tenant     :if hash    rid -> grant       :gw hash  gateway -> seat
--   :ls zset  order -> rid, where more than MOST_HELD grants are in flight
--   :mb hash  gateway -> letters        :pl hash  key -> place         :px zset  expiry -> key
-- args[1]  the batch, args[2] the caller's rules or "", args[3] prefix of the nudge channels
--
-- A command of the server costs more than all arithmetic of an admission, so a tick reads and writes
-- one key. What it changes of grants, finishes, seats, mail and log cells is young: it rides in `:st`
-- behind the numbers, each entry whole, until there are MOST_YOUNG of them; then all go to keys of
-- their own at once. Most never do: a call that ends soon leaves nothing behind (docs/adr/0055).
--
-- Numbers are doubles, packed as such: text would lose digits (tostring(1.7e15) is 1.7e+15) and
-- costs ten times as much. All are integers below 2^53 but the drained fractions. `floor(a / b)` is
-- exact for those: a quotient below 2^53 / b cannot round up to the next integer.
local LAYOUT, MICRO, FULL, BACKUP = 3, 1000000, 1000000, 50000
local floor, ceil, max, min, unp, pk, sub, rep, concat, call     -- bound by the first call: none exists while loading
local function int(x) return string.format('%d', x) end   -- %d casts to 64 bits: exact, and a third of %.0f
local formats = {}                             -- beginning, then how many doubles behind it -> format
local function format(before, n, after)
  local all = formats[before]
  if not all then
    all = {}
    formats[before] = all
  end
  local f = all[n]
  if not f then
    f = before .. rep('d', n) .. (after or '')
    all[n] = f
  end
  return f
end
local vectors = {}                             -- n -> format of n doubles
local function doubles(n)
  local f = vectors[n]
  if not f then
    f = '<' .. rep('d', n)
    vectors[n] = f
  end
  return f
end
local function packed(v)
  local n = #v
  if n == 0 then return '' end
  return pk(doubles(n), unpack(v))
end

-- State `t`: the numbers of SCALARS by name; then by index four lanes each from BL, CN, V, TOP, FIN
-- (lane 0 at +0), five numbers per dimension and three per log. `:st` begins with what few ticks
-- change: layout, head of the rules, scalars from RARE on, BL, CN, and what follows SU. Whoever changes
-- one of these sets `stale`, else only the bytes behind are written: the seal (writer, epoch, version,
-- now), the other scalars and numbers, and what is young.
local SCALARS = {'lay', 'epoch', 'version', 'now', 'seq', 'lseq', 'fly', 'hold', 'demand', 'demand_at', 'factor', 'factor_at', 'cut_at',
  'blocked', 'ease', 'eased', 'chores', 'waiting', 'places', 'shadow', 'seats', 'trust', 'due', 'zero', 'zero_at', 'touch', 'listed'}
local SEAL, RARE = 4, 11
local BL, CN, V, TOP, FIN, HEAD, BEFORE_FIN = 1, 5, 9, 13, 17, 20, 16
local stale                  -- one of the numbers that few ticks change has changed
local PAD = 64               -- zeros that may stand behind the last young entry
local CHECK = 0              -- 1: find out whether anybody forgot to say so

-- One call's own values.
local c, base, B = {events = {}, out = {}, view = {}}, '', ''   -- tables are used again: they keep their size

-- The pool: what was read or written outlives the call in `known`, for as long as the stored state is
-- the one that this code wrote. Its seal says so: who wrote it (an address in that server's memory),
-- epoch, version, instant. No two ticks that one server remembers share them, and of two servers that
-- both wrote while neither saw the other, each knows its own.
--   seal, state, head, rules; lead: bytes before the seal; size: of young entries, as stored
--   odd: grants_gone, queues_dirty or mail_dirty may hold something
--   grants  by request id; complete: no other is in flight
--   grants_put, grants_gone  young: their entries, and ids that `:if` still holds
--   ends  where complete: order of ending -> rid, and none before `first`
--   finishes, finish_put, on_file  by lane + 1; on_file: `:fl<lane>` holds something
--   queues  lane|tenant -> {count, latest tag} of a tenant's waiters, as far as known
--   waiters  by request id; everyone: nobody else waits
--   seats; mail  gateway -> letters, as far as known
local P
local MOST_KNOWN = 5000      -- pools remembered; beyond it all are forgotten at once
local MOST_HELD = 2000       -- grants remembered per pool; above, they lie in `:if` and `:ls` alone
local MOST_YOUNG = 40        -- entries that ride in `:st`
local MOST_CELLS = 256       -- log cells remembered per window that are not young
local writer                 -- says whose memory this is
local known, pools = {}, 0   -- base of keys -> what its last call left behind

-- --- rules

local R, nd            -- the rules in force, their number of dimensions
local lim, win, cal, off, logof, scales, depths, caps, ceilings, rolling
local logs             -- per distinct window: {w, width, keep, dims, key, oldest = index in t, cells = {}, dirty = {}}
local t                -- the state's numbers
local FR, LV, SU, FO, FAT  -- offsets of the numbers per dimension; OFT numbers of `t` from V on change often
local OFT

local function rules(body)
  local n = string.byte(body)
  local r = {unp('<B' .. rep('d', 10 + 12 * n), body)}
  r.n, r.body, r.at = n, body, r[12 + 12 * n]
  r.conc, r.spread, r.pace, r.lease, r.dead, r.kmax, r.maxw, r.queue, r.mode, r.shape = unpack(r, 2, 11)
  return r               -- and 12 numbers for each dimension from r[12 * i]
end
local function texts(r)  -- because, its permits' because, then name and because of each dimension
  if not r.texts then
    local out = {unp('<' .. rep('I2c0', 2 + 2 * r.n), r.body, r.at)}
    r.texts = out
  end
  return r.texts
end
local function because_of(i)
  local x = texts(R)
  if i == -2 then return x[2] ~= '' and x[2] or x[1] end
  if i == -1 then return x[1] end
  return x[2 + 2 * i]
end
local function prepare(r)
  r.lim, r.win, r.cal, r.off, r.logof, r.scales, r.logs, r.rolling = {}, {}, {}, {}, {}, {}, {}, false
  r.depths, r.caps, r.ceilings = {{}, {}, {}, {}}, {{}, {}, {}, {}}, {{}, {}, {}, {}}
  for i = 1, r.n do
    local limit, window, calendar = r[12 * i], r[12 * i + 1], r[12 * i + 10]
    r.lim[i], r.win[i], r.cal[i], r.off[i] = limit, window, calendar, r[12 * i + 11]
    r.scales[i] = calendar > 0 and 0 or window / max(1, limit)
    r.rolling = r.rolling or calendar == 0
    r.calendar = r.calendar or calendar > 0
    for lane = 1, 4 do
      local c0 = r[12 * i + 5 + lane]
      r.depths[lane][i] = calendar > 0 and limit or r[12 * i + 1 + lane]
      r.caps[lane][i] = c0
      r.ceilings[lane][i] = c0 ~= 0 and c0 or limit
    end
    r.logof[i] = false
    if r.caps[1][i] ~= 0 and calendar == 0 then
      local g
      for _, one in ipairs(r.logs) do if one.w == window then g = one end end
      if not g then
        g = {w = window, width = max(20000, floor(window / 600)), keep = window + r.spread, dims = {},
             key = base .. ':lg' .. int(window)}
        r.logs[#r.logs + 1] = g
      end
      g.dims[#g.dims + 1] = i
      r.logof[i] = g
    end
  end
  for k, g in ipairs(r.logs) do
    g.oldest = HEAD + 5 * r.n + 3 * k - 2     -- then due, then cells in the ring
    g.nd = #g.dims
    g.entry = format('<BBd', g.nd)
    for at, i in ipairs(g.dims) do g[i] = at end
  end
  r.even = #r.logs > 0                        -- every dimension has a log
  for i = 1, r.n do r.even = r.even and r.logof[i] and true end
  local rare = (#SCALARS - RARE + 1) + (V - 1) + 2 * r.n + 3 * #r.logs
  r.rarely, r.often = format('<dc24', rare), doubles(RARE - SEAL - 1 + 12 + 3 * r.n)
  r.sealed = 32 + 8 * rare
  r.first, r.last = int(r.sealed), int(r.sealed + 31)
  r.plain = '<BdddddBdBBxxxxxxxxxxI4c0xxxxxxxxBB' .. rep('d', 4 + 3 * r.n)
  r.said = '<BdddddBdBBI2c0I2c0HI4c0I4c0I4c0I4c0BB'
  r.go = '<BI2c0ddB' .. rep('d', r.n)
end
local function use(r, warm)
  if warm and r == R then return end
  if not r.lim then prepare(r) end
  R, nd, logs, rolling = r, r.n, r.logs, r.rolling
  lim, win, cal, off, logof, scales = r.lim, r.win, r.cal, r.off, r.logof, r.scales
  depths, caps, ceilings = r.depths, r.caps, r.ceilings
  FR, LV, SU, FO, FAT, OFT = HEAD, HEAD + nd, HEAD + 2 * nd, HEAD + 3 * nd, HEAD + 4 * nd, 12 + 3 * nd
  if not warm then
    for _, g in ipairs(logs) do g.cells, g.dirty, g.top = {}, {}, false end
  end
end
local ring = {}               -- the rare ways, with every cell in memory
function ring.cells(g) return floor(g.keep / g.width) + 3 end

-- What a list of dimensions meters: one text per dimension, and its unit.
local function meters(r)
  if r.meters then return r.meters end
  local x, out = texts(r), {}
  for i = 1, r.n do
    local b = 12 * i
    local logged = (r[b + 6] ~= 0 or r[b + 7] ~= 0 or r[b + 8] ~= 0 or r[b + 9] ~= 0) and '1' or '0'
    local name = x[1 + 2 * i]
    out[i] = {name .. ' ' .. int(r[b + 1]) .. ' ' .. int(r[b + 10]) .. ' ' .. int(r[b + 11]) .. ' ' .. logged, name}
  end
  r.meters = out
  return out
end
local shapes
local function shape_of(id)
  if id == R.shape then return meters(R) end
  shapes = shapes or {}
  if not shapes[id] then
    local raw, ms, p = call('HGET', base .. ':sh', int(id)) or '', {}, 1
    while p <= #raw do
      local m, n
      m, n, p = unp('<I2c0I2c0', raw, p)
      ms[#ms + 1] = {m, n}
    end
    shapes[id] = ms
  end
  return shapes[id]
end
local function keep_shape(r)
  local out = {}
  for i, m in ipairs(meters(r)) do out[i] = pk('<I2c0I2c0', #m[1], m[1], #m[2], m[2]) end
  call('HSETNX', base .. ':sh', int(r.shape), concat(out))
end
local function translate(v, from, to, default)
  local by_meter, by_unit, out = {}, {}, {}
  for i, m in ipairs(from) do by_meter[m[1]] = v[i]; by_unit[m[2]] = v[i] end
  for i, m in ipairs(to) do
    local u = by_meter[m[1]]
    if u == nil then u = by_unit[m[2]] end
    if u == nil then u = default and default[i] or 0 end
    out[i] = u
  end
  return out
end

-- --- calendars

local period
do
  local function first_day(year, month)
    if month <= 2 then year = year - 1 end
    local era = floor(year / 400)
    local yoe = year - era * 400
    local doy = floor((153 * (month > 2 and month - 3 or month + 9) + 2) / 5)
    return era * 146097 + yoe * 365 + floor(yoe / 4) - floor(yoe / 100) + doy - 719468
  end
  function period(kind, east, now)
    local DAY = 86400 * MICRO
    local today = floor((now + east) / DAY)
    local first, after = today, today + 1
    if kind == 2 then
      local shifted = today + 719468
      local era = floor(shifted / 146097)
      local doe = shifted - era * 146097
      local yoe = floor((doe - floor(doe / 1460) + floor(doe / 36524) - floor(doe / 146096)) / 365)
      local doy = doe - (365 * yoe + floor(yoe / 4) - floor(yoe / 100))
      local mp = floor((5 * doy + 2) / 153)
      local month = mp < 10 and mp + 3 or mp - 9
      local year = yoe + era * 400 + (month <= 2 and 1 or 0)
      first = first_day(year, month)
      after = first_day(year + floor(month / 12), month % 12 + 1)
    end
    return first * DAY - east, after * DAY - east
  end
end
local function starts_at(i) if cal[i] > 0 then return (period(cal[i], off[i], t.now)) end; return 0 end
local function ends_at(i, now) local _, e = period(cal[i], off[i], now or t.now); return e end

-- --- the sliding logs: a ring of cells, a cell holds the dimensions of its window

local function read_cells(g, first, n)      -- the stored numbers of n cells, one after the other
  local size, bytes, out = t[g.oldest + 2], 8 * g.nd, {}
  while n > 0 do
    local at = first % size
    local run = min(n, size - at, 200)
    local raw = call('GETRANGE', g.key, int(at * bytes), int((at + run) * bytes - 1))
    if #raw < run * bytes then raw = raw .. rep('\0', run * bytes - #raw) end
    local part = {unp(doubles(run * g.nd), raw)}
    local had = #out
    for k = 1, run * g.nd do out[had + k] = part[k] end
    first, n = first + run, n - run
  end
  return out
end
local function cell(g, number)              -- nil if it is no longer held
  if number < t[g.oldest] then return nil end
  local held = g.cells[number]
  if not held then
    if g.top and number > g.top then
      held = {}
      for k = 1, g.nd do held[k] = 0 end
    else
      held = read_cells(g, number, 1)
    end
    g.cells[number] = held
  end
  return held
end
local function amount(g, stored, first, number, i)
  local held = g.cells[number]
  if held then return held[g[i]] end
  return stored[(number - first) * g.nd + g[i]]
end
local function lifetime()     -- a pool that nobody uses is gone after a day; one with a budget, a day after its period
  local seconds = 86400
  for i = 1, nd do
    if cal[i] > 0 then seconds = max(seconds, ceil((ends_at(i) - t.now) / MICRO) + 86400) end
  end
  return int(seconds)
end
local function touch(...) for _, suffix in ipairs({...}) do call('EXPIRE', base .. suffix, lifetime()) end end
local function flush_cells(g)               -- one stretch, or two where the ring begins anew
  local low, high
  for number in pairs(g.dirty) do
    if not low or number < low then low = number end
    if not high or number > high then high = number end
  end
  if not low then return end
  local size, bytes = t[g.oldest + 2], 8 * g.nd
  while low <= high do
    local at = low % size
    local run = min(high - low + 1, size - at)
    local raw = run > 1 and call('GETRANGE', g.key, int(at * bytes), int((at + run) * bytes - 1)) or ''
    if #raw < run * bytes then raw = raw .. rep('\0', run * bytes - #raw) end
    local out, from = {}, 1
    for k = 0, run - 1 do
      if g.dirty[low + k] then
        out[#out + 1] = sub(raw, from, k * bytes)
        out[#out + 1] = packed(g.cells[low + k])
        from = (k + 1) * bytes + 1
      end
    end
    out[#out + 1] = sub(raw, from)
    call('SETRANGE', g.key, int(at * bytes), concat(out))
    low = low + run
  end
  g.dirty = {}
  call('EXPIRE', g.key, lifetime())
end
local function forget(g, now)
  local edge = floor((now - g.keep) / g.width)
  stale = true
  t[g.oldest + 1] = (edge + 1) * g.width + g.keep
  local first, cells, dirty = t[g.oldest], g.cells, g.dirty
  if edge <= first then return end
  local held = false
  for _, i in ipairs(g.dims) do held = held or t[SU + i] ~= 0 end
  if not held then
    flush_cells(g)                           -- all are zero, but what is stored may not know it
  elseif edge - first >= t[g.oldest + 2] then
    for _, i in ipairs(g.dims) do t[SU + i] = 0 end
    call('DEL', g.key)
  else
    local n, size, bytes = edge - first, t[g.oldest + 2], 8 * g.nd
    local gone = read_cells(g, first, n)
    for k = 0, n - 1 do
      local mine = cells[first + k]
      for at, i in ipairs(g.dims) do t[SU + i] = t[SU + i] - (mine and mine[at] or gone[k * g.nd + at]) end
    end
    local at = first % size
    local run = min(n, size - at)
    call('SETRANGE', g.key, int(at * bytes), rep('\0', run * bytes))
    if n > run then call('SETRANGE', g.key, '0', rep('\0', (n - run) * bytes)) end
  end
  t[g.oldest] = edge
  dirty = g.dirty
  local left = 0
  for number in pairs(cells) do
    if number < edge then cells[number], dirty[number] = nil, nil else left = left + 1 end
  end
  if left > MOST_CELLS then
    for number in pairs(cells) do if not dirty[number] then cells[number] = nil end end
  end
end
local function held_at(g, at)               -- the cell of an instant, nil if no longer held, and its number
  local number = at / g.width
  number = number - number % 1
  local held = g.cells[number]
  if not held or number < t[g.oldest] then held = cell(g, number) end
  return held, number
end
local function stir(g, number)
  g.dirty[number] = true
  if not g.top or number > g.top then g.top = number end
end
local function until_gone(g, now, i, over)
  local newest = floor(now / g.width)
  local last, first, n = newest, t[g.oldest], 8
  while first <= newest and over > 0 do
    n = min(n, newest - first + 1)
    local stored = read_cells(g, first, n)
    for number = first, first + n - 1 do
      local units = amount(g, stored, first, number, i)
      if units ~= 0 then
        last, over = number, over - units
        if over <= 0 then break end
      end
    end
    first, n = first + n, 4 * n
  end
  return max(1, (last + 1) * g.width + g.keep - now)
end
function ring.open(g)                 -- every cell in memory: for the rare ways
  flush_cells(g)
  local newest = max(floor(t.now / g.width), t[g.oldest])
  local first = t[g.oldest]
  local stored, all = read_cells(g, first, newest - first + 1), {}
  for number = first, newest do
    local c = {}
    for k = 1, g.nd do c[k] = stored[(number - first) * g.nd + k] end
    all[number] = c
  end
  return all, first, newest
end
function ring.store(g, all, first, newest)
  call('DEL', g.key)
  g.cells, g.dirty, g.top = {}, {}, false
  local size, bytes = t[g.oldest + 2], 8 * g.nd
  for number = first, newest do call('SETRANGE', g.key, int((number % size) * bytes), packed(all[number])) end
end
function ring.fill(g, i, total)
  local all, first, newest = ring.open(g)
  for number = first, newest do all[number][g[i]] = 0 end
  local cells = max(1, newest - first)
  local each = floor(total / cells)
  for number = newest - cells + 1, newest do
    all[number] = all[number] or {}
    all[number][g[i]] = each
  end
  all[newest][g[i]] = each + (total - each * cells)
  t[SU + i] = total
  ring.store(g, all, first, newest)
end

-- --- the meter

local reason = -1
local function room(lane, i)
  local c = caps[lane + 1][i]
  if t.factor < FULL then c = floor(c * (t.factor / 1e6)) end
  return c - t[FO + i]
end
local function usual_rates()   -- nobody else uses the quota, the factor is full: as `rate` would say
  local fast, calm, brinks = {}, {}, {}
  for i = 1, nd do
    local room = caps[2][i]
    fast[i] = max(0, lim[i]) * (R.pace / 1e6) * 1 / win[i]
    calm[i] = R.pace <= FULL and fast[i] or max(0, lim[i]) * (970000 / 1e6) * 1 / win[i]
    brinks[i] = R.pace > FULL and room ~= 0 and floor(room / 10) * 9 + floor((room % 10) * 9 / 10) or 0
  end
  R.fast, R.calm, R.brinks = fast, calm, brinks
end
local function rate(i)
  if t.factor == FULL and t[FO + i] == 0 then
    if not R.fast then usual_rates() end
    return t[SU + i] < R.brinks[i] and R.calm[i] or R.fast[i]
  end
  local pace, brink = R.pace, 0
  if pace > FULL then
    if caps[2][i] ~= 0 then
      local r = room(1, i)
      brink = floor(r / 10) * 9 + floor((r % 10) * 9 / 10)    -- r * 900000 // 1000000 without leaving 2^53
    end
    if t[SU + i] < brink then pace = 970000 end
  end
  return max(0, lim[i] - t[FO + i]) * (pace / 1e6) * (t.factor / 1e6) / win[i]
end
local function lent()
  for i = 1, nd do if t[FO + i] > 0 then return true end end
  return false
end
local function growing() return t.factor < FULL or lent() end
local function easing()
  local since = t.now - t.ease
  if t.ease == 0 or since < 0 then return 0 end
  if since >= MICRO then t.ease, stale = 0, true; return 0 end
  return max(0, t.eased * 100000 - since)
end
local function decay()
  stale = true
  for i = 1, nd do
    local share = t[FO + i]
    if share > 0 then
      local step = max(1, floor(min(30 * MICRO, floor(win[i] / 2)) / 16))
      local steps = floor((t.now - t[FAT + i]) / step)
      t[FAT + i] = t[FAT + i] + steps * step
      while steps > 0 and share > 0 do
        share = floor(share * 0.957603280698574)
        steps = steps - 1
        if share * 1000 < lim[i] then share = 0 end
      end
      t[FO + i] = share
    end
  end
end
local function meter_advance(now)
  local elapsed, before = now - t.now, t.now
  if elapsed <= 0 then return end
  t.now = now
  if t.factor < FULL then
    local seconds = floor((now - t.factor_at) / MICRO)
    if seconds > 0 then
      t.factor, stale = min(FULL, t.factor + seconds * 1000), true
      t.factor_at = t.factor_at + seconds * MICRO
    end
  end
  local usual, borrowed, fast = t.factor == FULL and R.fast ~= nil, false, R.fast
  for i = 1, nd do
    local level, foreign = t[LV + i], t[FO + i]
    if foreign > 0 then borrowed = true end
    if level > 0 and cal[i] == 0 then
      local r
      if usual and foreign == 0 then            -- as `rate` would say
        r = t[SU + i] < R.brinks[i] and R.calm[i] or fast[i]
      else
        r = rate(i)
      end
      local drained = r * elapsed + t[FR + i]
      local whole = drained - drained % 1
      if level > whole then
        t[LV + i], t[FR + i] = level - whole, drained - whole
      else
        t[LV + i], t[FR + i] = 0, 0
      end
    end
  end
  if borrowed then decay() end
  if R.calendar then
    for i = 1, nd do
      if cal[i] > 0 and now >= ends_at(i, before) then t[LV + i] = 0 end
    end
  end
  for k = 1, #logs do
    local g = logs[k]
    if now >= t[g.oldest + 1] then forget(g, now) end
  end
end
local function charge(cost, most)
  if t.ease ~= 0 then t.eased, stale = t.eased + 1, true end
  for k = 1, #logs do
    local g = logs[k]
    local held, number = held_at(g, t.now)
    local dims, some = g.dims, false
    for at = 1, #dims do
      local i = dims[at]
      local units = cost[i]
      if units ~= 0 then held[at], t[SU + i], some = held[at] + units, t[SU + i] + units, true end
    end
    if some then stir(g, number) end
  end
  for i = 1, nd do
    local level = t[LV + i] + cost[i]
    if most and cal[i] == 0 and level > lim[i] then level = lim[i] end
    t[LV + i] = level
  end
end
local function correct(cost, actual, at, lost)
  for i = 1, nd do
    local delta, g = actual[i] - cost[i], logof[i]
    if delta > 0 then
      t[LV + i] = t[LV + i] + delta
      if g then
        local held, number = held_at(g, t.now)
        held[g[i]], t[SU + i] = held[g[i]] + delta, t[SU + i] + delta
        stir(g, number)
      end
    elseif delta < 0 and not (lost and cal[i] == 0) and (cal[i] == 0 or at >= starts_at(i)) then
      local level = t[LV + i] + delta
      t[LV + i] = level > 0 and level or 0
      local held, number
      if g then held, number = held_at(g, at) end
      if held then
        if held[g[i]] + delta < 0 then delta = -held[g[i]] end
        if delta ~= 0 then
          held[g[i]], t[SU + i] = held[g[i]] + delta, t[SU + i] + delta
          g.dirty[number] = true
        end
      end
    end
  end
end
local function span_of(cost)
  local largest = 0
  for i = 1, nd do
    local share = cost[i] * scales[i]
    if share > largest then largest = share end
  end
  local span = largest - largest % 1
  if span == 0 then return rolling and 1 or 100 end
  return span
end
local function fit_one(i, lane, units)
  local level = t[LV + i]
  if cal[i] > 0 then
    if level + units > lim[i] then return ends_at(i) - t.now end
    return 0
  end
  local wait = 0
  if level > 0 then
    local over = level + units - depths[lane + 1][i]
    if over > 0 then
      local r = rate(i)
      wait = r > 0 and ceil(min(over, level) / r) or MICRO
    end
  end
  local g = logof[i]
  if g and t[SU + i] ~= 0 then
    local over = t[SU + i] + units - room(lane, i)
    if over > 0 then wait = max(wait, until_gone(g, t.now, i, over)) end
  end
  return wait
end
local function fit(lane, cost)
  if t.blocked <= t.now and not (t.ease ~= 0 and easing() > 0) then
    local fits, depth, cap, cut = true, depths[lane + 1], caps[lane + 1], t.factor < FULL
    for i = 1, nd do
      local units, level, held = cost[i], t[LV + i], t[SU + i]
      if (level > 0 and level + units > depth[i]) or
        (held > 0 and held + units > (cut and room(lane, i) or cap[i] - t[FO + i])) then fits = false end
    end
    if fits then return 0 end
  end
  local wait = max(0, t.blocked - t.now, easing())
  reason = -1
  for i = 1, nd do
    if cost[i] > 0 then
      local mine = fit_one(i, lane, cost[i])
      if mine > wait then wait, reason = mine, i end
    end
  end
  return wait
end
local function hard_wait(cost)
  local wait = max(0, t.blocked - t.now)
  for i = 1, nd do
    if cal[i] > 0 and cost[i] > 0 and t[LV + i] + cost[i] > lim[i] then wait = max(wait, ends_at(i) - t.now) end
  end
  return wait
end
local function fill(which)
  for i = 1, nd do
    if cal[i] == 0 and (not which or which[i]) then
      t[LV + i], t[FR + i] = max(t[LV + i], depths[2][i]), 0
      if logof[i] then ring.fill(logof[i], i, caps[2][i]) end
    end
  end
end
local ALL = {':cf', ':sh', ':q0', ':q1', ':q2', ':q3', ':rq', ':qt', ':fl0', ':fl1', ':fl2', ':fl3', ':if', ':ls', ':gw', ':mb', ':pl', ':px'}

-- --- grants

local leases, young = {}, {}   -- the rare ways
-- a grant is {order, end, at, lane, weight, span, tag, shape, epoch, tenant, cost, stored}: stored, if `:if` holds it
local function grant_text(g)
  local cost, tenant = g[11], g[10]
  return pk(format('<dddBBddddI2c0', #cost), g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], #tenant, tenant, unpack(cost))
end
local function grant_of(raw)
  local g = {unp('<dddBBddddI2c0', raw)}
  local p = g[11]
  local n = (#raw - p + 1) / 8
  local cost = {unp(doubles(n), raw, p)}
  cost[n + 1] = nil
  g[11], g[12] = cost, true
  return g
end
local function grant(rid)
  local g = P.grants[rid]
  if g or P.complete or t.fly == 0 or P.grants_gone[rid] then return g end
  local raw = call('HGET', base .. ':if', rid)
  g = raw and grant_of(raw) or nil
  P.grants[rid] = g
  return g
end
function leases.fetch(rids)            -- all at once: a call for each would cost more than the rest
  for first = 1, #rids, 1000 do
    local last = min(first + 999, #rids)
    local found = call('HMGET', base .. ':if', unpack(rids, first, last))
    for k = first, last do
      local rid, raw = rids[k], found[k - first + 1]
      if raw and not P.grants[rid] and not P.grants_gone[rid] then P.grants[rid] = grant_of(raw) end
    end
  end
end
local function last_to_end(rid, g)
  if P.complete and g[1] then P.ends[g[1]] = nil end
  t.lseq = t.lseq + 1
  g[1], P.grants_put[rid] = t.lseq, true
  if P.complete then P.ends[t.lseq] = rid end
end
local function hold_grant(rid, g)
  t.fly = t.fly + 1
  g[12] = P.grants_gone[rid]
  P.grants[rid], P.grants_gone[rid] = g, nil
  last_to_end(rid, g)
end
local function drop_grant(rid, g)
  t.fly = t.fly - 1
  if P.complete then P.ends[g[1]] = nil end
  if g[12] then P.grants_gone[rid], P.odd = true, true end
  P.grants[rid], P.grants_put[rid] = nil, nil
end
local function flush_grants()
  if next(P.grants_put) then
    local put, order, n = {}, {}, 0
    for rid in pairs(P.grants_put) do
      local g = P.grants[rid]
      put[n + 1], put[n + 2] = rid, grant_text(g)
      order[n + 1], order[n + 2] = int(g[1]), rid
      n, g[12] = n + 2, true
    end
    for k = 1, n, 1000 do
      local last = min(k + 999, n)
      call('HSET', base .. ':if', unpack(put, k, last))
      if t.listed == 1 then call('ZADD', base .. ':ls', unpack(order, k, last)) end
    end
    P.grants_put = {}
    touch(':if')
  end
  if next(P.grants_gone) then
    local gone = {}
    for rid in pairs(P.grants_gone) do gone[#gone + 1] = rid end
    for k = 1, #gone, 1000 do
      local last = min(k + 999, #gone)
      call('HDEL', base .. ':if', unpack(gone, k, last))
      if t.listed == 1 then call('ZREM', base .. ':ls', unpack(gone, k, last)) end
    end
    P.grants_gone = {}
  end
  if not P.complete then P.grants = {} end
end
function leases.know()                    -- the grants in memory are all there are
  local n, first = 0, t.lseq + 1
  P.complete, P.ends = true, {}
  for rid, g in pairs(P.grants) do
    n, P.ends[g[1]] = n + 1, rid
    if g[1] < first then first = g[1] end
  end
  P.ends.first, t.fly = first, n
end
function leases.read()
  local all = call('HGETALL', base .. ':if')
  for k = 1, #all, 2 do P.grants[all[k]] = grant_of(all[k + 1]) end
end
function leases.keep()                 -- few enough to be held in memory
  flush_grants()
  leases.read()
  leases.know()
  if t.listed == 1 then call('DEL', base .. ':ls') end
  t.listed, stale = 0, true
end
function leases.list()                 -- too many
  flush_grants()
  local order, n = {}, 0
  for rid, g in pairs(P.grants) do
    order[n + 1], order[n + 2] = int(g[1]), rid
    n = n + 2
  end
  call('DEL', base .. ':ls')
  for k = 1, n, 1000 do call('ZADD', base .. ':ls', unpack(order, k, min(k + 999, n))) end
  touch(':ls')
  t.listed, stale, P.complete, P.grants, P.ends = 1, true, false, {}, {}
end
local function first_grant()                -- rid and grant that end first
  if t.fly == 0 then return nil end
  if P.complete then
    local at = P.ends.first
    while not P.ends[at] and at < t.lseq do at = at + 1 end
    P.ends.first = at
    return P.ends[at], P.grants[P.ends[at]]
  end
  flush_grants()
  local rid = call('ZRANGE', base .. ':ls', '0', '0')[1]
  if not rid then return nil end
  return rid, grant(rid)
end
local function next_end(none)
  local _, g = first_grant()
  return g and g[2] or none
end
function leases.expire(now)
  local ended = 0
  while t.fly > 0 and ended < 1000 do
    local rid, g = first_grant()
    if not g or g[2] > now then return end
    if P.complete then
      drop_grant(rid, g)
      ended = ended + 1
    else
      for _, one in ipairs(call('ZRANGE', base .. ':ls', '0', '99')) do
        g = grant(one)
        if not g or g[2] > now then break end
        drop_grant(one, g)
        ended = ended + 1
      end
    end
  end
end
function leases.each(change)            -- of all, for the rare ways
  if P.complete then
    for rid, g in pairs(P.grants) do
      change(g)
      P.grants_put[rid] = true
    end
    return
  end
  flush_grants()
  for _, rid in ipairs(call('ZRANGE', base .. ':ls', '0', '-1')) do
    local g = grant(rid)
    if g then
      change(g)
      call('HSET', base .. ':if', rid, grant_text(g))
    end
  end
  P.grants = {}
end

-- --- the line

local function finish_of(lane, tenant)
  local f = P.finishes[lane + 1][tenant]
  if f == nil then
    f = P.on_file[lane + 1] and tonumber(call('ZSCORE', base .. ':fl' .. lane, tenant) or false) or 0
    P.finishes[lane + 1][tenant] = f
  end
  return f
end
local function fetch_finishes(lane, tenants)  -- a set of names
  local names = {}
  for tenant in pairs(tenants) do
    if P.finishes[lane + 1][tenant] == nil and #names < 1000 then names[#names + 1] = tenant end
  end
  if #names < 2 then return end
  local found = call('ZMSCORE', base .. ':fl' .. lane, unpack(names))
  for k, tenant in ipairs(names) do P.finishes[lane + 1][tenant] = found[k] and tonumber(found[k]) or 0 end
end
local function clear_finishes(lane)
  local all, put = P.finishes[lane + 1], P.finish_put[lane + 1]
  for tenant in next, all do all[tenant], put[tenant] = nil, nil end
  t[FIN + lane] = 0
  if P.on_file[lane + 1] then call('DEL', base .. ':fl' .. lane) end
  P.on_file[lane + 1] = false
end
local function flush_finishes()
  for lane = 0, 3 do
    if next(P.finish_put[lane + 1]) then
      local put, gone = {}, {}
      for tenant in pairs(P.finish_put[lane + 1]) do
        local f = P.finishes[lane + 1][tenant]
        if f == 0 then gone[#gone + 1] = tenant else put[#put + 1] = int(f); put[#put + 1] = tenant end
      end
      for k = 1, #put, 1000 do call('ZADD', base .. ':fl' .. lane, unpack(put, k, min(k + 999, #put))) end
      if P.on_file[lane + 1] then
        for k = 1, #gone, 1000 do call('ZREM', base .. ':fl' .. lane, unpack(gone, k, min(k + 999, #gone))) end
      end
      P.finish_put[lane + 1] = {}
      if #put > 0 then
        P.on_file[lane + 1] = true
        touch(':fl' .. lane)
      end
    end
  end
end
local function step(span, weight)
  if weight == 1 then return span end          -- a span is at least 1
  local each = span / weight
  return each < 1 and 1 or each - each % 1
end
local function rebook(lane, tenant, change)
  local l, virtual = lane + 1, t[V + lane]
  if t[FIN + lane] == 0 then
    if change <= 0 then return end
    t[FIN + lane] = 1
  end
  local all = P.finishes[l]
  local old = all[tenant] or finish_of(lane, tenant)
  local finish = (old > virtual and old or virtual) + change
  if finish > virtual then
    all[tenant], P.finish_put[l][tenant] = finish, true
    if finish > t[TOP + lane] then t[TOP + lane] = finish end
  elseif old ~= 0 then                         -- at or before V it equals absence
    all[tenant], P.finish_put[l][tenant] = 0, P.on_file[l] or nil
  end
end
local function queued(lane, tenant)
  local key = lane .. '|' .. tenant
  local q = P.queues[key]
  if not q then
    local raw = t.waiting > 0 and call('HGET', base .. ':qt', key)
    q = raw and {unp('<dd', raw)} or {0, 0}
    P.queues[key] = q
  end
  return q, key
end
local function start_tag(lane, tenant)
  local tag, now = t[V + lane], t.now
  if tag < now and t[CN + lane] == 0 then tag = now; t[V + lane] = now end
  if t[FIN + lane] == 1 then
    if t[TOP + lane] > tag then
      local finish = finish_of(lane, tenant)
      if finish > tag then tag = finish end
    else
      clear_finishes(lane)
    end
  end
  if t[CN + lane] > 0 then
    local q = queued(lane, tenant)
    if q[1] > 0 and q[2] > tag then tag = q[2] end
  end
  return tag
end
local BEFORE = 4503599627370496
local function number(before)
  t.seq = t.seq + 1
  return before and t.seq - BEFORE or t.seq
end
local function member(w)
  local m = w.member
  if not m then
    m = string.format('%016d%016d', w.seq + BEFORE, w.span) .. w.rid
    w.member = m
  end
  return m
end
local function store_waiter(w)
  call('HSET', base .. ':rq', w.rid,
    pk(format('<ddBBddddI2c0I2c0BI2c0', #w.cost), w.tag, w.seq, w.lane, w.weight, w.span, w.deadline, w.deadline_in, w.shape,
      #w.tenant, w.tenant, #w.gateway, w.gateway, w.place and 1 or 0, #(w.place or ''), w.place or '', unpack(w.cost)))
end
function young.waiter(rid, raw)
  local w, p, kept = {rid = rid}, nil, nil
  w.tag, w.seq, w.lane, w.weight, w.span, w.deadline, w.deadline_in, w.shape, w.tenant, w.gateway, kept, w.place, p =
    unp('<ddBBddddI2c0I2c0BI2c0', raw)
  if kept == 0 then w.place = nil end
  local n = (#raw - p + 1) / 8
  w.cost = {unp(doubles(n), raw, p)}
  w.cost[n + 1] = nil
  return w
end
local function waiter(rid)
  local w = P.waiters[rid]
  if w == nil and not P.everyone then
    local raw = t.waiting > 0 and call('HGET', base .. ':rq', rid)
    w = raw and young.waiter(rid, raw) or false
    P.waiters[rid] = w
  end
  return w
end
local function join(w)
  local lane = w.lane
  local q, key = queued(lane, w.tenant)
  P.waiters[w.rid] = w
  t[BL + lane], t[CN + lane], t.waiting = t[BL + lane] + w.span, t[CN + lane] + 1, t.waiting + 1
  q[1], q[2], P.queues_dirty[key], P.odd, stale = q[1] + 1, w.tag > q[2] and w.tag or q[2], true, true, true
  store_waiter(w)
  call('ZADD', base .. ':q' .. lane, int(w.tag), member(w))
  if t[CN + lane] == 1 then touch(':q' .. lane, ':rq') end
end
local function leave(w)
  local lane = w.lane
  P.waiters[w.rid] = nil
  call('HDEL', base .. ':rq', w.rid)
  call('ZREM', base .. ':q' .. lane, member(w))
  local q, key = queued(lane, w.tenant)
  q[1], P.queues_dirty[key], P.odd, stale = q[1] - 1, true, true, true
  if q[1] == 0 then q[2] = 0 end
  t[BL + lane], t[CN + lane], t.waiting = t[BL + lane] - w.span, t[CN + lane] - 1, t.waiting - 1
end
local function zero_refunds(span) t.zero, stale = max(0, t.zero - 10 * span), true end
local function zero_carries(span)
  local held = max(0, t.zero - 3 * (t.now - t.zero_at))
  t.zero_at, stale = t.now, true
  local fits = held + 10 * span <= 180 * MICRO
  t.zero = fits and held + 10 * span or held
  return fits
end
local function give_back(w)
  leave(w)
  if w.lane == 0 then zero_refunds(w.span) end
  rebook(w.lane, w.tenant, -step(w.span, w.weight))
end
local function head(lane)
  if t[CN + lane] == 0 then return nil end
  local m = call('ZRANGE', base .. ':q' .. lane, '0', '0')[1]
  return waiter(sub(m, 33))
end
local function ahead(lane)
  local sum = 0
  for k = 0, lane do sum = sum + t[BL + k] end
  return sum
end
local function ahead_of(lane, tag, seq)
  if t.waiting > 1000 then return ahead(lane) end
  local sum, mark = lane > 0 and ahead(lane - 1) or 0, string.format('%016d', seq + BEFORE)
  for _, m in ipairs(call('ZRANGEBYSCORE', base .. ':q' .. lane, '-inf', '(' .. int(tag))) do sum = sum + tonumber(sub(m, 17, 32)) end
  for _, m in ipairs(call('ZRANGEBYSCORE', base .. ':q' .. lane, int(tag), int(tag))) do
    if sub(m, 1, 16) < mark then sum = sum + tonumber(sub(m, 17, 32)) end
  end
  return sum
end
local function rest(now)
  for lane = 0, 3 do
    if t[FIN + lane] == 1 then
      if t[CN + lane] == 0 and t[TOP + lane] <= now then
        clear_finishes(lane)
        t[V + lane] = max(t[V + lane], now)
      elseif P.on_file[lane + 1] then          -- a finish at or before V equals absence
        flush_finishes()
        P.finishes[lane + 1] = {}
        call('ZREMRANGEBYSCORE', base .. ':fl' .. lane, '-inf', int(t[V + lane]))
      else
        for tenant, f in pairs(P.finishes[lane + 1]) do
          if f <= t[V + lane] then P.finishes[lane + 1][tenant], P.finish_put[lane + 1][tenant] = nil, nil end
        end
      end
    end
  end
end

-- --- kept places

local places = {}
function places.of(key)
  local raw = t.places > 0 and call('HGET', base .. ':pl', key)
  if not raw then return nil end
  local p = {}
  p.tag, p.seq, p.lane, p.step, p.expires, p.tenant = unp('<ddBddI2c0', raw)
  return p
end
function places.store(key, p)
  call('HSET', base .. ':pl', key, pk('<ddBddI2c0', p.tag, p.seq, p.lane, p.step, p.expires, #p.tenant, p.tenant))
  call('ZADD', base .. ':px', int(p.expires), key)
end
function places.drop(key)
  call('HDEL', base .. ':pl', key)
  call('ZREM', base .. ':px', key)
  t.places, stale = t.places - 1, true
end
function places.expire(now, least)
  for done = 0, 99 do
    if t.places == 0 then return end
    local first = call('ZRANGE', base .. ':px', '0', '0', 'WITHSCORES')
    if tonumber(first[2]) > now and done >= least then return end
    local p = places.of(first[1])
    places.drop(first[1])
    rebook(p.lane, p.tenant, -p.step)
  end
end
function places.next(now)
  if t.places == 0 then return now + 120 * MICRO end
  return tonumber(call('ZRANGE', base .. ':px', '0', '0', 'WITHSCORES')[2])
end
function places.take(key, lane)
  local p = places.of(key)
  if not p or lane < p.lane then return nil end
  places.drop(key)
  return p
end
function places.keep(w, eta)
  if not w.place then return end
  local known = t.places > 0 and call('HEXISTS', base .. ':pl', w.place) == 1
  if not known and t.places >= 10000 then places.expire(0, 1) end
  places.store(w.place, {tag = w.tag, seq = w.seq, lane = w.lane, step = step(w.span, w.weight), expires = t.now + eta + 120 * MICRO,
                        tenant = w.tenant})
  if not known then t.places, stale = t.places + 1, true end
  if t.places == 1 then touch(':pl', ':px') end
end

-- --- seats and mail

local nudged, nudge
local HALF = 30 * MICRO
local function seat(name)
  local s = P.seats[name]
  if s == nil then
    local raw = call('HGET', base .. ':gw', name)
    s = raw and {} or false
    if raw then s.seen, s.demand, s.demand_at, s.mail_seq, s.letters = unp('<ddddd', raw) end
    P.seats[name] = s
  end
  return s
end
local function flush_seats()
  if not next(P.seats_dirty) then return end
  local put = {}
  for name in pairs(P.seats_dirty) do
    local s, n = P.seats[name], #put
    put[n + 1], put[n + 2] = name, pk('<ddddd', s.seen, s.demand, s.demand_at, s.mail_seq, s.letters)
  end
  for k = 1, #put, 1000 do call('HSET', base .. ':gw', unpack(put, k, min(k + 999, #put))) end
  P.seats_dirty = {}
  touch(':gw')
end
local function letters(name)
  local box = P.mail[name]
  if not box then
    box = {seat(name).letters > 0 and call('HGET', base .. ':mb', name) or nil}
    P.mail[name] = box
  end
  return box
end
local function each_letter(name, visit)      -- visit(number, event's bytes, whole letter)
  local raw, p = concat(letters(name)), 1
  while p <= #raw do
    local seq, event, after = unp('<dI4c0', raw, p)
    visit(seq, event, sub(raw, p, after - 1))
    p = after
  end
end
local function faded(demand, since, now) return floor(demand / 2 ^ min(64, floor(now / HALF) - floor(since / HALF))) end
local function silent(name)
  if t.now < t.trust then return false end
  local s = seat(name)
  return not s or t.now - s.seen > R.dead
end
local function post(name, event)             -- into the gateway's mail, where it has a seat
  local s = seat(name)
  if not s then return false end
  local box = letters(name)
  s.mail_seq, s.letters = s.mail_seq + 1, s.letters + 1
  box[#box + 1] = pk('<dI4c0', s.mail_seq, #event, event)
  P.mail_dirty[name], P.seats_dirty[name], P.odd = true, true, true
  return true
end
local function send(name, event)
  if post(name, event) and name ~= c.gw and not nudge[name] then
    nudge[name] = true
    nudged[#nudged + 1] = name
  end
end

local read = {}
local function go_event(rid, tag, waited)
  if R.even then return pk(R.go, 0, #rid, rid, tag, waited, nd, unpack(t, SU + 1, SU + nd)) end
  for i = 1, nd do read[i] = logof[i] and t[SU + i] or t[LV + i] end
  return pk(R.go, 0, #rid, rid, tag, waited, nd, unpack(read, 1, nd))
end
local function shed_event(rid, eta, tag, full, because) return pk('<BI2c0ddBI2c0', 1, #rid, rid, eta, tag, full, #because, because) end
local function never_event(rid, i, cost, most)
  local x = texts(R)
  local name, because = x[1 + 2 * i], x[2 + 2 * i]
  return pk('<BI2c0ddI2c0I2c0', 2, #rid, rid, cost, most, #name, name, #because, because)
end
local function late_event(rid, eta, tag, because) return pk('<BI2c0ddI2c0', 3, #rid, rid, eta, tag, #because, because) end

-- --- the core

local function never(lane, cost)
  for i = 1, nd do if cost[i] > ceilings[lane + 1][i] then return i, ceilings[lane + 1][i] end end
end
local function wait_of(lane, cost)
  local wait, limit = fit(lane, cost), R.conc
  if limit > 0 and t.fly >= limit then
    local full = max(1, next_end(t.now) - t.now)
    if full > wait then reason = -2; return full end
  end
  return wait
end
local function held_by(lane, cost)
  if wait_of(lane, cost) == 0 then
    local best = 0
    reason = -1
    for i = 1, nd do
      local share = cost[i] * scales[i]
      if cal[i] == 0 and cost[i] > 0 and (reason == -1 or share > best) then best, reason = share, i end
    end
  end
  return because_of(reason)
end
local function stretched(work) if t.factor == FULL then return work end; return floor(work / (t.factor / 1e6)) end
local function eta_of(w)
  local known, limit = P.waiters[w.rid] and true or false, R.conc
  local eta = stretched(ahead(w.lane))
  if known or eta > w.deadline_in then eta = stretched(ahead_of(w.lane, w.tag, w.seq)) end
  if limit > 0 and t.hold > 0 and t.fly >= limit then
    local before = known and -1 or 0
    for k = 0, w.lane do before = before + t[CN + k] end
    eta = max(eta, floor(t.hold * before / limit))
  end
  return eta
end
local function recharge(g, actual)
  correct(g[11], actual, g[3], g[9] ~= t.epoch)
  local span, weight = g[6], g[5]
  if span > 0 then
    local used = 0
    for i = 1, nd do if actual[i] > 0 then used = step(span_of(actual), weight); break end end
    rebook(g[4], g[10], used - step(span, weight))
  end
end
local function cancel(rid)
  local w = waiter(rid)
  if w then return give_back(w) end
  local g = grant(rid)
  if g then
    drop_grant(rid, g)
    local none = {}
    for i = 1, nd do none[i] = 0 end
    recharge(g, none)
  end
end

local function stalled() t.trust, stale = t.now + R.dead, true end
local function restart(by)
  t.epoch, t.version, t.touch, stale = t.epoch + 1, 0, 0, true
  if by ~= 0 then
    for _, k in ipairs({'now', 'factor_at', 'cut_at', 'zero_at', 'trust', 'due', 'demand_at'}) do t[k] = t[k] + by end
    t.blocked = max(0, t.blocked + by)
    t.ease = t.ease ~= 0 and max(0, t.ease + by) or 0
    for i = 1, nd do t[FAT + i], t[SU + i] = t[FAT + i] + by, 0 end
    for _, g in ipairs(logs) do
      call('DEL', g.key)
      g.cells, g.dirty, g.top = {}, {}, false
      t[g.oldest], t[g.oldest + 1] = floor((t.now - g.keep) / g.width), 0
    end
    flush_finishes()
    for lane = 0, 3 do
      t[V + lane], t[TOP + lane] = t[V + lane] + by, t[TOP + lane] + by
      P.finishes[lane + 1] = {}
      local all = call('ZRANGE', base .. ':fl' .. lane, '0', '-1', 'WITHSCORES')
      for k = 1, #all, 2 do call('ZINCRBY', base .. ':fl' .. lane, int(by), all[k]) end
      for _, m in ipairs(call('ZRANGE', base .. ':q' .. lane, '0', '-1')) do
        local w = waiter(sub(m, 33))
        w.tag, w.deadline = w.tag + by, w.deadline + by
        store_waiter(w)
        call('ZADD', base .. ':q' .. lane, int(w.tag), m)
      end
    end
    young.queues()
    P.queues = {}
    local all = call('HGETALL', base .. ':qt')
    for k = 1, #all, 2 do
      local count, last = unp('<dd', all[k + 1])
      call('HSET', base .. ':qt', all[k], pk('<dd', count, last + by))
    end
    for _, key in ipairs(call('HKEYS', base .. ':pl')) do
      local p = places.of(key)
      p.tag, p.expires = p.tag + by, p.expires + by
      places.store(key, p)
    end
    flush_seats()
    for _, name in ipairs(call('HKEYS', base .. ':gw')) do
      local s = seat(name)
      s.seen, s.demand_at, P.seats_dirty[name] = s.seen + by, s.demand_at + by, true
    end
    leases.each(function(g) g[2], g[3], g[7] = g[2] + by, g[3] + by, g[7] + by end)
  end
  fill()
  stalled()
  t.chores = 0
end
local function advance(given_now, lost)
  local elapsed = given_now - t.now
  if elapsed < -MICRO then return restart(elapsed) end
  if lost then restart(0) end
  meter_advance(given_now)
  if given_now < t.chores then return end
  stale = true
  local now = t.now
  if elapsed > floor(R.dead / 2) then stalled() end
  leases.expire(now)
  places.expire(now, 0)
  rest(now)
  if now >= t.due then
    t.due = now + floor(R.dead / 2)
    if t.seats >= 2 then
      flush_seats()
      local names = call('HKEYS', base .. ':gw')
      table.sort(names)
      local gone = {}
      for _, name in ipairs(names) do if silent(name) then gone[#gone + 1] = name end end
      for _, name in ipairs(gone) do
        local s, back = seat(name), {}
        if s.letters > 0 then
          each_letter(name, function(_, event) if string.byte(event) == 0 then back[#back + 1] = unp('<I2c0', event, 2) end end)
        end
        t.demand = max(0, faded(t.demand, t.demand_at, now) - faded(s.demand, s.demand_at, now))
        t.demand_at, t.seats = now, t.seats - 1
        call('HDEL', base .. ':gw', name)
        call('HDEL', base .. ':mb', name)
        P.seats[name], P.seats_dirty[name], P.mail[name], P.mail_dirty[name] = false, nil, nil, nil
        for _, rid in ipairs(back) do cancel(rid) end
      end
    end
  end
  t.chores = min(next_end(now + R.lease), places.next(now), t.due)
end

-- --- state in, rules in force

local function fresh(now)                    -- a pool that nobody knew
  for _, suffix in ipairs(ALL) do if suffix ~= ':cf' and suffix ~= ':sh' then call('DEL', base .. suffix) end end
  for _, g in ipairs(logs) do call('DEL', g.key) end
  P.complete, P.ends = true, {first = 1}
  t = {}
  for _, name in ipairs(SCALARS) do t[name] = 0 end
  for k = 1, HEAD + 5 * nd + 3 * #logs do t[k] = 0 end
  t.lay, t.epoch, t.now, t.factor, t.factor_at, t.cut_at = LAYOUT, now, now, FULL, now, now - MICRO
  t.trust, t.due, t.zero_at, t.demand_at = now + R.dead, now + floor(R.dead / 2), now, now
  for lane = 0, 3 do t[V + lane] = now end
  for i = 1, nd do t[FAT + i] = now end
  for _, g in ipairs(logs) do t[g.oldest], t[g.oldest + 2] = floor((now - g.keep) / g.width), ring.cells(g) end
  if c.cold == 1 and R.queue == 1 then fill() end
end
local function sorted_waiters()
  local all = {}
  for lane = 0, 3 do
    for _, m in ipairs(call('ZRANGE', base .. ':q' .. lane, '0', '-1')) do all[#all + 1] = waiter(sub(m, 33)) end
  end
  return all
end
local function regenerate(old, new)          -- another list of dimensions: generations.py
  local before, after = meters(old), meters(new)
  local there, known, held, wanted = {}, {}, {}, {}
  for j, m in ipairs(before) do there[m[1]] = j end
  local ot, oLV, oSU, oFO, oFAT, oFR = t, LV, SU, FO, FAT, FR
  for _, g in ipairs(logs) do
    local all, first, newest = ring.open(g)
    held[#held + 1] = {g, all, first, newest}
    call('DEL', g.key)
  end
  local old_logof = {}
  for i = 1, old.n do old_logof[i] = logof[i] end
  use(new)
  local now, nt = ot.now, {}
  for _, name in ipairs(SCALARS) do nt[name] = ot[name] end
  for k = 1, HEAD do nt[k] = ot[k] end
  for k = HEAD + 1, HEAD + 5 * nd + 3 * #logs do nt[k] = 0 end
  t = nt
  for _, g in ipairs(logs) do t[g.oldest], t[g.oldest + 1], t[g.oldest + 2] = floor((now - g.keep) / g.width), 0, ring.cells(g) end
  local rings = {}
  for i, m in ipairs(after) do
    local j = there[m[1]]
    t[FAT + i] = now
    if j then
      known[i] = true
      t[LV + i], t[FO + i], t[FAT + i], t[FR + i] = ot[oLV + j], ot[oFO + j], ot[oFAT + j], ot[oFR + j]
      local g, og = logof[i], old_logof[j]
      if g and og then
        if not rings[g] then rings[g] = {ring.open(g)} end
        local mine, first, newest = unpack(rings[g])
        for _, one in ipairs(held) do
          if one[1] == og then
            for number = max(one[3], first), min(one[4], newest) do
              local units = one[2][number][og[j]]
              mine[number][g[i]] = mine[number][g[i]] + units
              t[SU + i] = t[SU + i] + units
            end
          end
        end
      end
    end
    wanted[i] = not j and cal[i] == 0
  end
  for g, held_ring in pairs(rings) do ring.store(g, unpack(held_ring)) end
  if R.queue == 1 then fill(wanted) end
  for _, w in ipairs(sorted_waiters()) do w.cost = translate(w.cost, before, after); store_waiter(w) end
  leases.each(function(g) g[11] = translate(g[11], before, after) end)
end
local function reconfigure(new)
  stale = true
  advance(c.server, false)
  local old = R
  if old.shape == new.shape then
    local was = logs
    use(new)
    for k, g in ipairs(logs) do g.cells, g.dirty, g.top = was[k].cells, was[k].dirty, was[k].top end
  else
    regenerate(old, new)
  end
  if old.spread ~= new.spread then
    for _, g in ipairs(logs) do
      t[g.oldest + 1] = 0
      if ring.cells(g) > t[g.oldest + 2] then
        local all, first, newest = ring.open(g)
        t[g.oldest + 2] = ring.cells(g)
        ring.store(g, all, first, newest)
      end
    end
  end
  if R.mode == 0 then
    for _, w in ipairs(sorted_waiters()) do
      local i, most = never(w.lane, w.cost)
      if i then
        give_back(w)
        post(w.gateway, never_event(w.rid, i, w.cost[i], most))
      end
    end
  end
  keep_shape(R)
  t.chores = 0
end
-- kinds of young entries: 0 none from here on, 1 grant, 2 grant that ended, 3 finish, 4 seat, 5 log cell, 6 who is queued, 7 mail
function young.read(raw, p)
  if t.listed == 0 and t.fly > 0 then leases.read() end
  while p <= #raw do
    local kind, a, name, rest
    kind = string.byte(raw, p)
    if kind == 0 then break end
    if kind == 1 then
      name, rest, p = unp('<I2c0I2c0', raw, p + 1)
      local stored = t.listed == 1 or P.grants[name] ~= nil
      P.grants[name] = grant_of(rest)
      P.grants[name][12], P.grants_put[name] = stored, true
    elseif kind == 2 then
      name, p = unp('<I2c0', raw, p + 1)
      P.grants[name], P.grants_gone[name], P.odd = nil, true, true
    elseif kind == 3 then
      a, name, rest, p = unp('<BI2c0d', raw, p + 1)
      P.finishes[a + 1][name], P.finish_put[a + 1][name] = rest, true
    elseif kind == 4 then
      local s = {}
      name, s.seen, s.demand, s.demand_at, s.mail_seq, s.letters, p = unp('<I2c0ddddd', raw, p + 1)
      P.seats[name], P.seats_dirty[name] = s, true
    elseif kind == 6 then
      local q = {}
      name, q[1], q[2], p = unp('<I2c0dd', raw, p + 1)
      P.queues[name], P.queues_dirty[name], P.odd = q, true, true
    elseif kind == 7 then
      name, rest, p = unp('<I2c0I4c0', raw, p + 1)
      P.mail[name], P.mail_dirty[name], P.odd = {rest ~= '' and rest or nil}, true, true
    else
      a, name, p = unp('<Bd', raw, p + 1)
      local g = logs[a]
      local held = {unp(doubles(g.nd), raw, p)}
      p = held[g.nd + 1]
      held[g.nd + 1] = nil
      g.cells[name], g.dirty[name] = held, true
    end
  end
  if t.listed == 0 then leases.know() end
end
function young.gone(out, n, size)
  for rid, text in next, P.grants_gone do
    if text == true then
      text = pk('<BI2c0', 2, #rid, rid)
      P.grants_gone[rid] = text
    end
    n, size = n + 1, size + #text
    out[n] = text
  end
  return n, size
end
function young.said(out, n, size)
  for key, text in next, P.queues_dirty do
    if text == true then
      text = pk('<BI2c0dd', 6, #key, key, P.queues[key][1], P.queues[key][2])
      P.queues_dirty[key] = text
    end
    n, size = n + 1, size + #text
    out[n] = text
  end
  for name, text in next, P.mail_dirty do
    if text == true then
      local all = concat(P.mail[name])
      text = pk('<BI2c0I4c0', 7, #name, name, #all, all)
      P.mail_dirty[name] = text
    end
    n, size = n + 1, size + #text
    out[n] = text
  end
  return n, size
end
function young.write(out, n)            -- behind out[n]; how many there are now, and their bytes
  local size = 0
  for rid, text in next, P.grants_put do
    if text == true then
      local g = P.grants[rid]
      local cost, tenant = g[11], g[10]
      text = pk(format('<BI2c0I2dddBBddddI2c0', #cost), 1, #rid, rid, 60 + #tenant + 8 * #cost, g[1], g[2], g[3], g[4], g[5], g[6], g[7],
        g[8], g[9], #tenant, tenant, unpack(cost))
      P.grants_put[rid] = text
    end
    n, size = n + 1, size + #text
    out[n] = text
  end
  if P.odd then n, size = young.gone(out, n, size) end
  for lane = 1, 4 do
    if t[BEFORE_FIN + lane] == 1 then           -- else it has no finish
      local put = P.finish_put[lane]
      for tenant, text in next, put do
        if text == true then
          text = pk('<BBI2c0d', 3, lane - 1, #tenant, tenant, P.finishes[lane][tenant])
          put[tenant] = text
        end
        n, size = n + 1, size + #text
        out[n] = text
      end
    end
  end
  for name, text in next, P.seats_dirty do
    if text == true then
      local s = P.seats[name]
      text = pk('<BI2c0ddddd', 4, #name, name, s.seen, s.demand, s.demand_at, s.mail_seq, s.letters)
      P.seats_dirty[name] = text
    end
    n, size = n + 1, size + #text
    out[n] = text
  end
  if P.odd then n, size = young.said(out, n, size) end
  for index = 1, #logs do
    local dirty, cells = logs[index].dirty, logs[index].cells
    for number, text in next, dirty do
      if text == true then
        text = pk(logs[index].entry, 5, index, number, unpack(cells[number]))
        dirty[number] = text
      end
      n, size = n + 1, size + #text
      out[n] = text
    end
  end
  return n, size
end
function young.hash(suffix, put, gone)
  for k = 1, #put, 1000 do call('HSET', base .. suffix, unpack(put, k, min(k + 999, #put))) end
  for k = 1, #gone, 1000 do call('HDEL', base .. suffix, unpack(gone, k, min(k + 999, #gone))) end
  if #put > 0 then touch(suffix) end
end
function young.queues()
  if not next(P.queues_dirty) then return end
  local put, gone = {}, {}
  for key in pairs(P.queues_dirty) do
    local q, n = P.queues[key], #put
    if q[1] == 0 then gone[#gone + 1] = key else put[n + 1], put[n + 2] = key, pk('<dd', q[1], q[2]) end
  end
  P.queues_dirty = {}
  young.hash(':qt', put, gone)
end
function young.mail()
  if not next(P.mail_dirty) then return end
  local put, gone = {}, {}
  for name in pairs(P.mail_dirty) do
    local all, n = concat(P.mail[name]), #put
    if all == '' then gone[#gone + 1] = name else put[n + 1], put[n + 2] = name, all end
  end
  P.mail_dirty = {}
  young.hash(':mb', put, gone)
end
function young.waiters()                     -- few enough to be held in memory
  local all = call('HGETALL', base .. ':rq')
  P.waiters, P.everyone = {}, true
  for k = 1, #all, 2 do P.waiters[all[k]] = young.waiter(all[k], all[k + 1]) end
end
function young.flush()
  young.queues()
  young.mail()
  flush_grants()
  flush_finishes()
  flush_seats()
  for _, g in ipairs(logs) do flush_cells(g) end
  P.odd = false
end
local function open_pool()     -- an answer where nothing may be done
  local mine, newer = c.head, nil
  local k = known[base]
  if not k then
    if pools >= MOST_KNOWN then known, pools = {}, 0 end
    k = {key = base .. ':st'}
    known[base], pools = k, pools + 1
  end
  P = k
  local stored, in_force = k.seal and call('GETRANGE', k.key, k.rules.first, k.rules.last), nil
  local warm = stored and stored == k.seal
  stale = not warm
  if warm then
    t, in_force = k.state, k.head
  else
    t, R, stored, k.seal = nil, nil, call('GET', k.key), false
    k.grants, k.complete, k.ends, k.grants_put, k.grants_gone, k.odd = {}, false, {}, {}, {}, false
    k.finishes, k.finish_put, k.on_file, k.seats, k.seats_dirty = {{}, {}, {}, {}}, {{}, {}, {}, {}}, {false, false, false, false}, {}, {}
    k.queues, k.queues_dirty, k.mail, k.mail_dirty, k.waiters, k.everyone = {}, {}, {}, {}, {}, false
    local layout = stored and unp('<d', stored)
    if stored and layout > LAYOUT then return pk('<Bd', 2, layout) end
    in_force = layout == LAYOUT and sub(stored, 9, 32)
    if not in_force or in_force ~= k.head then
      local kept = call('GET', base .. ':cf')
      local head = kept and sub(kept, 1, 24)
      if in_force ~= head then stored, in_force = false, head end   -- an older layout, or its rules are gone: unreadable
      if head and head ~= k.head then k.head, k.rules = head, rules(sub(kept, 25)) end
    end
  end
  if in_force == mine then
    use(k.rules, warm)
  else
    if c.rules == '' then return pk('<B', 1) end
    c.differs = true
    if not in_force then
      k.head, k.rules = mine, rules(c.rules)
      use(k.rules, warm)
      call('SET', base .. ':cf', mine .. c.rules)
      keep_shape(R)
    else
      local have, theirs = unp('<d', in_force), unp('<d', mine)
      use(k.rules, warm)
      if theirs > have then
        call('SET', base .. ':cf', mine .. c.rules)
        if sub(in_force, 9) ~= sub(mine, 9) then newer = rules(c.rules) end
        k.head, k.rules, stale = mine, newer or k.rules, true
      elseif theirs == have then
        c.conflict = 1
      end
    end
  end
  if not stored then
    fresh(c.server)
  elseif not warm then
    local size, n, often = HEAD + 5 * nd + 3 * #logs, #SCALARS, RARE - SEAL - 1
    local v = {unp(doubles(n + size), stored, 33)}
    local p, sealed = v[n + size + 1], n - RARE + 1 + size - OFT + 1   -- numbers up to the seal's first
    t = {lay = LAYOUT, epoch = v[sealed + 1], version = v[sealed + 2], now = v[sealed + 3]}
    for k = 1, V - 1 do t[k] = v[n - RARE + 1 + k] end
    for k = 1, OFT do t[V - 1 + k] = v[sealed + 3 + often + k] end
    for k = V + OFT, size do t[k] = v[n - RARE + 1 + k - OFT] end
    for k = RARE, n do t[SCALARS[k]] = v[k - RARE + 1] end
    for k = 1, often do t[SCALARS[SEAL + k]] = v[sealed + 3 + k] end
    for lane = 0, 3 do P.on_file[lane + 1] = t[FIN + lane] == 1 end
    young.read(stored, p)
  end
  k.seal = false                -- until this call has ended well, nothing is known
  if not P.complete and t.fly <= MOST_HELD / 2 then leases.keep() end
  if not P.everyone and t.waiting <= MOST_HELD / 2 then young.waiters() end
  if newer then reconfigure(newer) end
end

-- --- the tick

local function sit_down()
  advance(c.server, c.seen_version > t.version and c.seen_epoch == t.epoch)
  local now = t.now
  c.me = seat(c.gw)
  if not c.me then
    c.me, c.rejoin, t.seats, stale = {demand = 0, demand_at = now, mail_seq = 0, letters = 0}, 1, t.seats + 1, true
    P.seats[c.gw] = c.me
  end
  c.me.seen, P.seats_dirty[c.gw] = now, true
  if c.me.letters > 0 and c.ack > 0 then
    if c.ack >= c.me.mail_seq then
      P.mail[c.gw], c.me.letters, P.mail_dirty[c.gw], P.odd = {}, 0, true, true
    else
      local left = {}
      each_letter(c.gw, function(seq, _, letter) if seq > c.ack then left[#left + 1] = letter end end)
      if #left < c.me.letters then
        P.mail[c.gw], c.me.letters, P.mail_dirty[c.gw], P.odd = left, #left, true, true
      end
    end
  end

  c.spoken = R.shape
  if c.differs then
    local theirs = rules(c.rules)
    if theirs.shape ~= R.shape then
      c.spoken, c.speaks = theirs.shape, meters(theirs)
      keep_shape(theirs)
    end
  end
end
local function vector(n, p)    -- n numbers of the batch; a table of known size is half as dear as one of any
  if n == 2 then
    local a, b, after = unp('<dd', B, p)
    return {a, b}, after
  elseif n == 1 then
    local a, after = unp('<d', B, p)
    return {a}, after
  elseif n == 3 then
    local a, b, d, after = unp('<ddd', B, p)
    return {a, b, d}, after
  elseif n == 4 then
    local a, b, d, e, after = unp('<dddd', B, p)
    return {a, b, d, e}, after
  end
  local v = {unp(doubles(n), B, p)}
  p = v[n + 1]
  v[n + 1] = nil
  return v, p
end
local function amounts(p)
  local v
  v, p = vector(c.snd, p)
  return c.speaks and translate(v, c.speaks, meters(R)) or v, p
end
local function tell(event)
  c.told = c.told + 1
  c.events[c.told] = event
end
local function signal_all()
  local now = t.now
  stale = true
  for _ = 1, c.n_sig do
    local foreign
    foreign, c.pos = amounts(c.pos)
    for i = 1, nd do
      if foreign[i] > t[FO + i] and cal[i] == 0 then t[FO + i], t[FAT + i] = foreign[i], now end
    end
  end
end
local function at_hand() return P.complete and not (P.on_file[1] or P.on_file[2] or P.on_file[3] or P.on_file[4]) end
local function look_ahead(n, item)            -- what lies in keys, all at once: a call for each would cost more than the rest
  local rids, tenants, p, lane, tenant = {}, {{}, {}, {}, {}}, c.pos, nil, nil
  for k = 1, n do
    p, rids[k], lane, tenant = item(p)
    if lane then tenants[lane + 1][tenant] = true end
  end
  if not P.complete then leases.fetch(rids) end
  for _, rid in ipairs(rids) do
    local g = grant(rid)
    if g and g[6] > 0 then tenants[g[4] + 1][g[10]] = true end
  end
  for l = 0, 3 do
    if P.on_file[l + 1] then fetch_finishes(l, tenants[l + 1]) end
  end
end
local function actual_of(g, actual, n, refused)
  if actual and g[8] ~= R.shape then
    local from = shape_of(g[8])
    actual = #from == n and translate(actual, from, shape_of(R.shape), g[11]) or nil
  elseif actual and n ~= nd then
    actual = nil
  end
  if not actual then
    actual = g[11]
    if refused then
      actual = {}
      for i = 1, nd do actual[i] = texts(R)[1 + 2 * i] == 'requests' and g[11][i] or 0 end
    end
  end
  return actual
end
local function settle_all()
  local now, pos = t.now, c.pos
  if c.n_set > 1 and not at_hand() then
    look_ahead(c.n_set, function(p)
      local rid, _, _, count, after = unp('<I2c0BdB', B, p)
      return after + 8 * count, rid
    end)
  end
  for _ = 1, c.n_set do
    local rid, outcome, after, n, actual
    rid, outcome, after, n, pos = unp('<I2c0BdB', B, pos)
    if n > 0 then actual, pos = vector(n, pos) end
    local g = P.grants[rid] or grant(rid)
    if g then
      drop_grant(rid, g)
      local refused, cost = outcome == 1 or outcome == 2, g[11]
      if not actual or n ~= nd or g[8] ~= R.shape then actual = actual_of(g, actual, n, refused) end
      for i = 1, nd do
        if actual[i] ~= cost[i] then
          recharge(g, actual)
          break
        end
      end
      if refused then
        t.blocked = max(t.blocked, now + min(max(0, after), 300 * MICRO))
        t.ease, t.eased, stale = t.blocked, 0, true
        if outcome == 1 and now - t.cut_at >= MICRO then
          t.factor = max(500000, floor(t.factor * 980000 / 1000000))
          t.cut_at, t.factor_at = now, now
        end
      elseif R.conc > 0 then
        local held = now - g[3]
        t.hold = t.hold + (t.hold ~= 0 and floor((held - t.hold) / 16) or held)
      end
    end
  end
  c.pos = pos
end
local function step_aside(w, eta)
  if w.place then
    leave(w)
    places.keep(w, eta)
  else
    give_back(w)
  end
end
local function late(w)
  local because, eta = held_by(w.lane, w.cost), eta_of(w)
  step_aside(w, eta)
  return late_event(w.rid, eta, w.tag, because)
end
local function withdraw_all()
  for _ = 1, c.n_can do
    local rid
    rid, c.pos = unp('<I2c0', B, c.pos)
    cancel(rid)
  end
  for _ = 1, c.n_late do
    local rid
    rid, c.pos = unp('<I2c0', B, c.pos)
    local w = waiter(rid)
    if w then tell(late(w)) end
  end
end
local function granted(rid, lane, tenant, weight, cost, span, tag, shape)
  charge(cost, R.mode == 1)
  hold_grant(rid, {false, t.now + R.lease, t.now, lane, weight, span, tag, shape, t.epoch, tenant, cost, false})
end
local function adopt_all()
  local now = t.now
  for _ = 1, c.n_ado do
    local rid, has, charged, lane, weight, tenant, cost
    rid, has, charged, lane, weight, tenant, c.pos = unp('<I2c0BBBBI2c0', B, c.pos)
    if has == 1 then cost, c.pos = amounts(c.pos) end
    local g = grant(rid)
    if g then
      g[2] = now + R.lease
      last_to_end(rid, g)
    elseif cost then
      local w = waiter(rid)
      if w then give_back(w) end
      if charged == 1 then charge(cost, false) end
      local span = span_of(cost)
      rebook(lane, tenant, step(span, weight))
      hold_grant(rid, {false, now + R.lease, now, lane, weight, span, t[V + lane], c.spoken, charged == 1 and t.epoch or 0, tenant,
                       cost, false})
    end
  end
end

-- --- acquire

local function place(a, lane)                 -- tag, sequence number, whether its span is counted already
  local kept = a.place and places.take(a.place, lane)
  if kept then
    if kept.lane == lane then return kept.tag, kept.seq, true end
    rebook(kept.lane, kept.tenant, -kept.step)
  elseif a.tag and lane == a.lane and not a.ticket then
    return a.tag, number(true), false
  end
  local tag = start_tag(lane, a.tenant)
  return tag, number(false), false
end
local function enter(a, left)
  local lane, cost, span = a.lane, a.cost, span_of(a.cost)
  if lane == 0 and not zero_carries(span) then lane = 1 end
  local tag, seq, kept = place(a, lane)
  local wait = 0
  if left > 0 and ahead(lane) == 0 then
    wait = wait_of(lane, cost)
    if wait == 0 then
      if not kept then rebook(lane, a.tenant, step(span, a.weight)) end
      t[V + lane] = max(t[V + lane], tag)
      granted(a.rid, lane, a.tenant, a.weight, cost, span, tag, c.spoken)
      return go_event(a.rid, tag, 0), true
    end
  end
  local w = {rid = a.rid, tag = tag, seq = seq, lane = lane, weight = a.weight, span = span, deadline = t.now + a.deadline_in,
             deadline_in = a.deadline_in, shape = c.spoken, tenant = a.tenant, gateway = c.gw, place = a.place, cost = cost}
  local eta = max(eta_of(w), hard_wait(cost))
  if a.deadline_in <= 0 or not (t.fly > 0 or growing()) then eta = max(eta, wait) end
  local full = t.waiting >= R.maxw
  local refused = full or eta > a.deadline_in
  local because
  if refused then
    if lane == 0 then zero_refunds(span) end
    because = full and because_of(-1) or held_by(lane, cost)
  end
  if not kept and (not refused or a.place) then rebook(lane, a.tenant, step(span, a.weight)) end
  if refused then
    places.keep(w, eta)
    return shed_event(a.rid, eta, tag, full and 1 or 0, because)
  end
  join(w)
end
local function acquire(a, left)
  local cost = a.cost
  if R.mode == 2 then return go_event(a.rid, 0, 0), true end
  if R.mode == 1 then
    if never(a.lane, cost) or wait_of(a.lane, cost) > 0 then t.shadow, stale = t.shadow + 1, true end
    granted(a.rid, a.lane, a.tenant, a.weight, cost, 0, 0, c.spoken)
    return go_event(a.rid, 0, 0), true
  end
  local i, most = never(a.lane, cost)
  if i then return never_event(a.rid, i, cost[i], most) end
  if R.queue == 1 then return enter(a, left) end
  local wait = wait_of(a.lane, cost)
  if wait > 0 then return shed_event(a.rid, wait, 0, 0, because_of(reason)) end
  granted(a.rid, a.lane, a.tenant, a.weight, cost, 0, 0, c.spoken)
  return go_event(a.rid, 0, 0), true
end
local function acquire_all()                  -- they come in lane order
  local left, pos, plain = R.kmax, c.pos, R.mode == 0 and R.queue == 1
  if c.n_acq > 1 and not at_hand() then
    look_ahead(c.n_acq, function(p)
      local rid, lane, _, _, _, _, tenant, _, after = unp('<I2c0BBdBdI2c0I2c0', B, p)
      return after + 8 * c.snd, rid, lane, tenant
    end)
  end
  for _ = 1, c.n_acq do
    local rid, lane, weight, deadline_in, flags, tag, tenant, kept, cost
    rid, lane, weight, deadline_in, flags, tag, tenant, kept, pos = unp('<I2c0BBdBdI2c0I2c0', B, pos)
    cost, pos = amounts(pos)
    if t.seats > 1 then c.asked = c.asked + span_of(cost) end
    local g = P.grants[rid] or grant(rid)
    local w = not g and t.waiting > 0 and waiter(rid)
    if g then
      tell(go_event(rid, g[7], 0))
    elseif w then
      if w.gateway ~= c.gw then
        w.gateway = c.gw
        store_waiter(w)
      end
    elseif plain and t.waiting == 0 and t.places == 0 and lane > 0 and left > 0 and flags % 2 == 0 and not never(lane, cost)
      and wait_of(lane, cost) == 0 then       -- `enter` would do the same, step by step
      local span, start = span_of(cost), start_tag(lane, tenant)
      t.seq = t.seq + 1
      rebook(lane, tenant, weight == 1 and span or step(span, weight))
      if start > t[V + lane] then t[V + lane] = start end
      granted(rid, lane, tenant, weight, cost, span, start, c.spoken)
      tell(go_event(rid, start, 0))
      left = left - 1
    else
      local event, took = acquire({rid = rid, lane = lane, weight = weight, deadline_in = deadline_in, tag = flags % 2 == 1 and tag,
        tenant = tenant, place = flags % 4 >= 2 and kept, ticket = flags >= 4, cost = cost}, left)
      if took then left = left - 1 end
      if event then tell(event) end
    end
  end
  c.pos = pos
end

-- --- pump

local function served(h)
  local wait = R.mode == 0 and wait_of(h.lane, h.cost) or 0
  if wait == 0 then
    leave(h)
    t[V + h.lane] = max(t[V + h.lane], h.tag)
    local waited = t.now - (h.deadline - h.deadline_in)
    granted(h.rid, h.lane, h.tenant, h.weight, h.cost, h.span, h.tag, h.shape)
    send(h.gateway, go_event(h.rid, h.tag, waited))
    return true
  end
  local because, hard = because_of(reason), hard_wait(h.cost)
  if t.now + hard > h.deadline then
    step_aside(h, hard)
    send(h.gateway, shed_event(h.rid, hard, h.tag, 0, because))
    return true
  end
  c.blocked_by = because
  c.wake = t.now + (growing() and min(wait, MICRO) or wait)
  c.owner = h.gateway
  return false
end
local function pump()
  local left = R.kmax
  for lane = 0, 3 do
    local h = head(lane)
    while h do
      if h.deadline < t.now then
        send(h.gateway, late(h))
      elseif h.gateway ~= c.gw and silent(h.gateway) then
        give_back(h)
      elseif left == 0 then
        c.wake, c.owner = t.now + 1, c.gw
        return
      elseif served(h) then
        left = left - 1
      else
        if h.gateway ~= c.gw then c.wake = c.wake + BACKUP end
        return
      end
      h = head(lane)
    end
  end
end

-- --- reply and state out

local function rarely()        -- all bytes before the seal
  local v = c.view
  for k = 1, V - 1 do v[k] = t[k] end
  local size = #t
  for k = V + OFT, size do v[k - OFT] = t[k] end
  return pk(R.rarely, t.lay, P.head, t.factor, t.factor_at, t.cut_at, t.blocked, t.ease, t.eased, t.chores, t.waiting, t.places, t.shadow,
    t.seats, t.trust, t.due, t.zero, t.zero_at, t.touch, t.listed, unpack(v, 1, size - OFT))
end
local function answer()
  local now = t.now
  local share = 1000000
  if t.seats > 1 then
    local MOST = 2 ^ 42
    c.me.demand = min(faded(c.me.demand, c.me.demand_at, now) + c.asked, MOST)
    t.demand = min(faded(t.demand, t.demand_at, now) + c.asked, MOST)
    c.me.demand_at, t.demand_at = now, now
    local part, whole = min(c.me.demand, t.demand), t.demand
    if whole == 0 then
      share = 0
    else                                        -- part * 10^6 // whole without leaving 2^53
      local high = floor(part * 1000 / whole)
      share = high * 1000 + floor((part * 1000 - high * whole) * 1000 / whole)
    end
  end
  t.version = t.version + 1

  local letters_now = c.me.letters > 0 and concat(letters(c.gw)) or ''
  if P.complete and t.fly > MOST_HELD then leases.list() end
  local k, out = P, c.out
  local entries, size = young.write(out, 3)
  local forget_all = t.version % 4096 == 0
  if entries > MOST_YOUNG + 3 or size > 8192 or forget_all then
    young.flush()
    entries, size = 3, 0
  end
  local touched = now >= t.touch
  if touched then
    t.touch, stale = now + 60 * MICRO, true
    touch(unpack(ALL))
    for _, g in ipairs(logs) do call('EXPIRE', g.key, lifetime()) end
  end
  if CHECK == 1 and not stale and rarely() ~= k.lead then error('a number that few ticks change has changed') end
  if stale then k.lead = rarely() end
  local seal = pk('<dddd', writer, t.epoch, t.version, now)
  out[1], out[2] = k.lead, seal
  out[3] = pk(R.often, t.seq, t.lseq, t.fly, t.hold, t.demand, t.demand_at, unpack(t, V, V - 1 + OFT))
  local less = stale and PAD + 1 or k.size - size
  if less > PAD then
    if touched then
      call('SET', k.key, concat(out, '', 1, entries), 'EX', lifetime())
    else
      call('SET', k.key, concat(out, '', 1, entries), 'KEEPTTL')
    end
  else
    if less > 0 then
      entries, size = entries + 1, k.size
      out[entries] = rep('\0', less)
    end
    call('SETRANGE', k.key, R.first, concat(out, '', 2, entries))
  end
  k.size = size
  k.seal, k.state = seal, t
  if k.everyone and t.waiting > MOST_HELD then k.everyone = false end
  if not k.everyone then k.waiters = {} end
  if forget_all then k.finishes, k.seats, k.queues, k.mail = {{}, {}, {}, {}}, {}, {}, {} end

  local own_events = c.told == 1 and c.events[1] or concat(c.events, '', 1, c.told)
  if R.even and t.waiting == 0 and #nudged == 0 and not c.differs and c.owner == '' and c.blocked_by == '' and letters_now == '' then
    return pk(R.plain, 0, now, t.epoch, t.version, c.me.mail_seq, c.wake, c.rejoin, share, c.conflict, 0, #own_events, own_events, nd, 0,
      t.fly, t.factor, t.blocked, t.shadow, unpack(t, LV + 1, FO + nd))
  end
  local names = ''
  for _, name in ipairs(nudged) do
    call('PUBLISH', c.channel .. name, base)
    names = names .. pk('<I2c0', #name, name)
  end
  local view, n = c.view, t.waiting > 0 and 1 or 0
  local last = 4
  view[1], view[2], view[3], view[4] = t.fly, t.factor, t.blocked, t.shadow
  if n == 1 then
    for lane = 0, 3 do view[5 + lane], view[9 + lane] = t[CN + lane], t[BL + lane] end
    last = 12
  end
  for i = 1, nd do
    view[last + i], view[last + nd + i], view[last + 2 * nd + i] = t[LV + i], logof[i] and t[SU + i] or t[LV + i], t[FO + i]
  end
  last = last + 3 * nd
  local rules_now = c.differs and (call('GET', base .. ':cf') or '') or ''
  return pk(format(R.said, last), 0, now, t.epoch, t.version, c.me.mail_seq, c.wake, c.rejoin, share, c.conflict, c.differs and 1 or 0,
    #c.owner, c.owner, #c.blocked_by, c.blocked_by, #nudged, #names, names, #own_events, own_events, #letters_now, letters_now,
    #rules_now, rules_now, nd, n, unpack(view, 1, last))
end

local function admit(keys, args)
  if not call then
    floor, ceil, max, min, concat, call = math.floor, math.ceil, math.max, math.min, table.concat, redis.call
    unp, pk, sub, rep = struct.unpack, struct.pack, string.sub, string.rep
    writer = tonumber(sub(tostring(c), 8), 16) or 0
  end
  base, B, reason = keys[1], args[1], -1
  c.rules, c.channel, c.differs, c.speaks, c.conflict, c.rejoin, c.told = args[2], args[3], false, false, 0, 0, 0
  c.asked, c.wake, c.owner, c.blocked_by = 0, 0, '', ''
  if not nudged or #nudged > 0 then nudged, nudge = {}, {} end
  shapes = false
  c.server, c.seen_epoch, c.seen_version, c.ack, c.cold, c.head, c.gw, c.snd, c.n_sig, c.n_set, c.n_can, c.n_late, c.n_ado,
    c.n_acq, c.pos = unp('<ddddBc24I2c0BHHHHHH', B)   -- head: revision and digest
  if c.server == 0 then
    local at = call('TIME')
    if at[1] ~= c.second then c.second, c.began = at[1], tonumber(at[1]) * MICRO end
    c.server = c.began + at[2]
  end
  local no = open_pool()
  if no then return no end
  sit_down()
  if c.n_sig > 0 then signal_all() end
  if c.n_set > 0 then settle_all() end
  if c.n_can + c.n_late > 0 then withdraw_all() end
  if c.n_ado > 0 then adopt_all() end
  if c.n_acq > 0 then acquire_all() end
  if t.waiting > 0 then pump() end
  return answer()
end
redis.register_function(NAME, admit)
