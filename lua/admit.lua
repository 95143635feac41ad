-- admit: takes the first requests off the queue for this epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  queue of requests
-- KEYS[3]  admitted requests
-- KEYS[4]  prefix of a request's keys
-- KEYS[5]  whether the queue is closed in this epoch
-- KEYS[6]  number of finished requests
-- KEYS[7]  whether the head was told that something arrived (includes/arrived.lua)
-- ARGV[1]  epoch of the caller
-- ARGV[2]  seconds for which the log keeps a request that has ended
-- ARGV[3]  how many requests to take at most
-- Reply    {closed, {id, what was asked for, length of the sequence so far}, ...}; closed is 1
--          if the queue is empty and closed, else 0
-- Errors   STALE
--
-- Fewer than asked for: the queue is empty, and the head is told when something arrives.
-- Requests that were cancelled in an epoch that did not come to end them are ended here.
--- @include "fence"
--- @include "ending"

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
  local known = redis.call('HMGET', request, 'asked', 'length', 'cancelled')
  if known[3] then
    ending(request, request .. ':events', KEYS[6], known[2], known[3], ARGV[2])
  else
    redis.call('ZADD', KEYS[3], score, id)
    found[#found + 1] = { tonumber(id), known[1], tonumber(known[2]) }
  end
end
return found
