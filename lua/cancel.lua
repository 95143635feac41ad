-- cancel: ends a request whose client no longer waits for it. Belongs to no epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- KEYS[4]  queue of requests
-- KEYS[5]  number of finished requests
-- ARGV[1]  prefix of the keys of an epoch, as of new_epoch
-- ARGV[2]  id of the request
-- ARGV[3]  reason
-- ARGV[4]  seconds for which the log keeps the request from now on
-- Reply    1: it was in the queue and has ended; 2: the head was notified and will end it; 0: it
--          had finished before
-- Errors   REQUEST  unknown
--
-- The head is notified by an entry "CANCEL <id>" in its ready list. If the epoch ends before the head
-- has acted, the next one finds the mark at the request (admit).
--- @include "request"
--- @include "end_request"
--- @include "queue"

local known = redis.call('HMGET', KEYS[2], 'length', 'reason', 'tenant')
if not known[1] then
  return unknown_request(ARGV[2])
end
if known[2] then
  return 0
end
if leave_queue(KEYS[4], ARGV[2], known[3]) then
  end_request(KEYS[2], KEYS[3], KEYS[5], known[1], ARGV[3], ARGV[4])
  return 1
end
redis.call('HSET', KEYS[2], 'cancelled', ARGV[3])
redis.call('RPUSH', ARGV[1] .. ':' .. redis.call('GET', KEYS[1]) .. ':ready:0', 'CANCEL ' .. ARGV[2])
return 2
