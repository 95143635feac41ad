-- enqueue: adds a request to the request log and to the queue. Belongs to no epoch.
--
-- KEYS[1]  counter of requests
-- KEYS[2]  queue of requests (list of ids)
-- KEYS[3]  arrivals (stream; wakes who waits for a request)
-- KEYS[4]  prefix of a request's keys (see includes/request.lua)
-- ARGV[1]  what was asked for (opaque)
-- ARGV[2]  length of the sequence at the start
-- ARGV[3]  ticket: a random word of the caller's
-- ARGV[4]  seconds for which the ticket is remembered
-- Reply    the request's id
-- Errors   none
--
-- Idempotent: a second call with the same ticket replies the id that the first one made.

local ticket = KEYS[4] .. ':tickets:' .. ARGV[3]
local known = redis.call('GET', ticket)
if known then
  return tonumber(known)
end
local id = redis.call('INCR', KEYS[1])
redis.call('SET', ticket, id, 'EX', ARGV[4])
redis.call('HSET', KEYS[4] .. ':' .. id, 'asked', ARGV[1], 'length', ARGV[2])
redis.call('RPUSH', KEYS[2], id)
redis.call('XADD', KEYS[3], 'MAXLEN', 1, id .. '-0', 'request', id)
return id
