-- finish: ends a request and publishes the reason to its readers.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- KEYS[4]  queue of requests
-- KEYS[5]  admitted requests
-- KEYS[6]  number of finished requests
-- ARGV[1]  epoch of the caller
-- ARGV[2]  id of the request
-- ARGV[3]  reason
-- ARGV[4]  seconds for which the log keeps the request from now on
-- ARGV[5]  nanoseconds from its start at the head to its first token; empty: not known
-- ARGV[6]  tokens of its prompt that were in the prefix cache; empty: not known
-- Reply    1, or 0 if it was finished before (the first reason stays)
-- Errors   STALE
--          REQUEST  unknown
--- @include "fence"
--- @include "request"
--- @include "end_request"
--- @include "queue"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local known = redis.call('HMGET', KEYS[2], 'length', 'reason', 'tenant')
if not known[1] then
  return unknown_request(ARGV[2])
end
if known[2] then
  return 0
end
leave_queue(KEYS[4], ARGV[2], known[3])
redis.call('ZREM', KEYS[5], ARGV[2])
end_request(KEYS[2], KEYS[3], KEYS[6], known[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 1
