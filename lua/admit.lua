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
-- Reply    {closed, {id, specification, length of the sequence so far}, ...}; closed is 1
--          if the queue is empty and closed, else 0
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
local found, most = { 0 }, tonumber(ARGV[3])
while #found <= most do
  local first = redis.call('ZPOPMIN', KEYS[2])
  local id, score = first[1], first[2]
  if not id then
    redis.call('DEL', KEYS[7])
    found[1] = redis.call('EXISTS', KEYS[5])
    break
  end
  local request = KEYS[4] .. ':' .. id
  local known = redis.call('HMGET', request, 'spec', 'length', 'cancelled')
  if known[3] then
    end_request(request, request .. ':events', KEYS[6], known[2], known[3], ARGV[2])
  else
    redis.call('ZADD', KEYS[3], score, id)
    found[#found + 1] = { tonumber(id), known[1], tonumber(known[2]) }
  end
end
return found
