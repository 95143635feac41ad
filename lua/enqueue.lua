-- enqueue: adds a request to the request log and to the queue. Belongs to no epoch.
--
-- KEYS[1]  epoch
-- KEYS[2]  counter of requests
-- KEYS[3]  queue of requests (includes/queue.lua)
-- KEYS[4]  prefix of a request's keys (see includes/request.lua)
-- ARGV[1]  prefix of the keys of an epoch, as of new_epoch
-- ARGV[2]  specification of the request (opaque)
-- ARGV[3]  length of the sequence at the start
-- ARGV[4]  ticket: a random text that the caller has chosen for this request
-- ARGV[5]  seconds for which the ticket is remembered
-- ARGV[6]  priority, a whole number below 2^20; of a tenant, lower values are taken first
-- ARGV[7]  tenant
-- Reply    the request's id
-- Errors   none
--
-- Idempotent: a second call with the same ticket replies the id that the first one made.
-- The head is notified (includes/notify_head.lua); the head of a new epoch reads the queue once
-- without a notification.
--- @include "notify_head"
--- @include "queue"

local ticket = KEYS[4] .. ':tickets:' .. ARGV[4]
local known = redis.call('GET', ticket)
if known then
  return tonumber(known)
end
local id = redis.call('INCR', KEYS[2])
redis.call('SET', ticket, id, 'EX', ARGV[5])
redis.call('HSET', KEYS[4] .. ':' .. id, 'spec', ARGV[2], 'length', ARGV[3], 'prompt', ARGV[3], 'tenant', ARGV[7])
-- Exact: a score has 53 bits.
join_queue(KEYS[3], id, ARGV[6] * 2 ^ 32 + id, ARGV[7])
local epoch = redis.call('GET', KEYS[1])
if epoch then
  notify_head(ARGV[1], epoch)
end
return id
