-- admit: takes the next request off the queue for this epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  queue of requests
-- KEYS[3]  admitted requests (list of ids)
-- KEYS[4]  prefix of a request's keys
-- KEYS[5]  whether the queue is closed in this epoch
-- KEYS[6]  number of finished requests
-- ARGV[1]  epoch of the caller
-- ARGV[2]  seconds for which the log keeps a request that has ended
-- Reply    {id, what was asked for}; if the queue is empty, 1 if it is closed, else 0
-- Errors   STALE
--
-- Requests that were cancelled in an epoch that did not come to end them are ended here.
--- @include "fence"
--- @include "ending"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
while true do
  local id = redis.call('LPOP', KEYS[2])
  if not id then
    return redis.call('EXISTS', KEYS[5])
  end
  local request = KEYS[4] .. ':' .. id
  local known = redis.call('HMGET', request, 'asked', 'length', 'cancelled')
  if not known[3] then
    redis.call('RPUSH', KEYS[3], id)
    return { tonumber(id), known[1] }
  end
  ending(request, request .. ':events', KEYS[6], known[2], known[3], ARGV[2])
end
