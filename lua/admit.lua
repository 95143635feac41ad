-- admit: takes requests off the queue for this epoch, those of tenants by turns.
--
-- KEYS[1]  epoch
-- KEYS[2]  queue of requests
-- KEYS[3]  admitted requests
-- KEYS[4]  prefix of a request's keys
-- KEYS[5]  whether the queue is closed in this epoch
-- KEYS[6]  number of finished requests
-- KEYS[7]  whether the head was notified of requests (includes/notify_head.lua)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  seconds for which the log keeps a request that has ended
-- ARGV[3]  how many requests to take at most, but for those below
-- ARGV[4..] for each tenant of which requests wait at the head, two:
--          tenant
--          the score of the last of them (includes/request.lua)
-- Reply    {closed, number of requests that are left, shared, {id, own, length of the sequence so far,
--          number of what it shares}, ...}; closed is 1 if the queue is empty and closed, else 0;
--          shared has the number and the specification of what requests have in common, one after
--          the other
-- Errors   STALE
--
-- Beyond ARGV[3], the head gets what it must know to be fair: of each tenant the first request if
-- none waits at the head, and those that come before the last one that does. The head is notified of
-- the next request. Requests that were cancelled in an epoch that ended before they did are ended
-- here.
--- @include "fence"
--- @include "end_request"
--- @include "queue"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
redis.call('DEL', KEYS[7])
local last = {}
for i = 4, #ARGV, 2 do
  last[ARGV[i]] = tonumber(ARGV[i + 1])
end
local parts, given = {}, {}
local found, room = { 0, 0, parts }, tonumber(ARGV[3])
local tenants, more = redis.call('SMEMBERS', KEYS[2] .. ':tenants'), true
table.sort(tenants)
while more do
  more = false
  for _, tenant in ipairs(tenants) do
    local first = redis.call('ZRANGE', KEYS[2] .. ':of:' .. tenant, 0, 0, 'WITHSCORES')
    local id, score = first[1], tonumber(first[2])
    if id and (room > 0 or not last[tenant] or score < last[tenant]) then
      more = true
      leave_queue(KEYS[2], id, tenant)
      local request = KEYS[4] .. ':' .. id
      local known = redis.call('HMGET', request, 'own', 'length', 'cancelled', 'shared')
      local number = tonumber(known[4])
      local spec = number and redis.call('HGET', KEYS[4] .. ':' .. number .. ':shared', 'spec')
      if not known[2] then -- Redis has evicted it: there is nothing to end
      elseif known[3] or not spec then -- of an older version, or evicted
        end_request(request, request .. ':events', KEYS[6], known[2], known[3] or 'failed', ARGV[2])
      else
        redis.call('ZADD', KEYS[3], first[2], id)
        if not given[number] then
          given[number] = true
          parts[#parts + 1] = number
          parts[#parts + 1] = spec
        end
        found[#found + 1] = { tonumber(id), known[1], tonumber(known[2]), number }
        last[tenant] = math.max(score, last[tenant] or score)
        room = room - 1
      end
    end
  end
end
found[2] = redis.call('ZCARD', KEYS[2])
if found[2] == 0 then
  found[1] = redis.call('EXISTS', KEYS[5])
end
return found
