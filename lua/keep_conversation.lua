-- keep_conversation: keeps a conversation that a later request may continue; while all of them take
-- more than a bound, the oldest one goes. Belongs to no epoch.
--
-- KEYS[1]  names of the conversations, the oldest first (list of "<bytes> <name>")
-- KEYS[2]  bytes of all of them
-- KEYS[3]  prefix of the keys of conversations: "<prefix>:<name>"
-- ARGV[1]  name
-- ARGV[2]  conversation (opaque)
-- ARGV[3]  seconds for which it is kept
-- ARGV[4]  bytes that all may take
-- Reply    1, or 0 if this one alone takes more, and is not kept
-- Errors   none
--
-- Idempotent: a name is used once. A conversation whose time is over counts until its turn comes.
local key = KEYS[3] .. ':' .. ARGV[1]
if redis.call('EXISTS', key) == 1 then
  return 1
end
local size, most = #ARGV[2], tonumber(ARGV[4])
if size > most then
  return 0
end
local used = redis.call('INCRBY', KEYS[2], size)
while used > most do
  local oldest = redis.call('LPOP', KEYS[1])
  if oldest then
    local bytes, name = oldest:match('^(%d+) (.*)$')
    redis.call('DEL', KEYS[3] .. ':' .. name)
    used = redis.call('DECRBY', KEYS[2], bytes)
  else -- Redis has evicted the list
    redis.call('SET', KEYS[2], size)
    used = size
  end
end
redis.call('RPUSH', KEYS[1], size .. ' ' .. ARGV[1])
redis.call('SET', key, ARGV[2], 'EX', ARGV[3])
-- Once none is left, the other keys go too.
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
