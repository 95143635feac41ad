-- admit: takes the next request off the queue for this epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  queue of requests
-- KEYS[3]  admitted requests (list of ids)
-- KEYS[4]  prefix of a request's keys
-- KEYS[5]  whether the queue is closed in this epoch
-- ARGV[1]  epoch of the caller
-- Reply    {id, what was asked for}; if the queue is empty, 1 if it is closed, else 0
-- Errors   STALE
--- @include "fence"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local id = redis.call('LPOP', KEYS[2])
if not id then
  return redis.call('EXISTS', KEYS[5])
end
redis.call('RPUSH', KEYS[3], id)
return { tonumber(id), redis.call('HGET', KEYS[4] .. ':' .. id, 'asked') }
