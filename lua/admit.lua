-- admit: takes the first requests off the queue for this epoch.
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
-- ARGV[3]  how many requests to take at most
-- Reply    {closed, shared, {id, own, length of the sequence so far, number of what it shares}, ...};
--          closed is 1 if the queue is empty and closed, else 0; shared has the number and the
--          specification of what requests have in common, one after the other
-- Errors   STALE
--
-- Fewer requests than ARGV[3]: the queue is empty, and the head is notified of the next request.
-- Requests that were cancelled in an epoch that ended before they did are ended here.
--- @include "fence"
--- @include "end_request"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local found, most, shared = { 0, {} }, tonumber(ARGV[3]), {}
while #found < most + 2 do
  local first = redis.call('ZPOPMIN', KEYS[2])
  local id, score = first[1], first[2]
  if not id then
    redis.call('DEL', KEYS[7])
    found[1] = redis.call('EXISTS', KEYS[5])
    break
  end
  local request = KEYS[4] .. ':' .. id
  local known = redis.call('HMGET', request, 'own', 'length', 'cancelled', 'shared')
  if known[3] or not known[4] then -- an older version has written it without what it shares
    end_request(request, request .. ':events', KEYS[6], known[2], known[3] or 'failed', ARGV[2])
  else
    redis.call('ZADD', KEYS[3], score, id)
    local number, parts = tonumber(known[4]), found[2]
    if not shared[number] then
      shared[number] = true
      parts[#parts + 1] = number
      parts[#parts + 1] = redis.call('HGET', KEYS[4] .. ':' .. number .. ':shared', 'spec')
    end
    found[#found + 1] = { tonumber(id), known[1], tonumber(known[2]), number }
  end
end
return found
