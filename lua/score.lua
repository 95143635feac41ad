-- score: tells the readers of a request what the target thinks of its prompt.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  base: the position of the first token that is told of
-- ARGV[3]  notes on the tokens (opaque words, one per token), joined by spaces
-- Reply    how many tokens were told of
-- Errors   STALE
--
-- Idempotent: positions that were told of before are skipped, as are requests that have ended, also
-- if the log has forgotten them since.
--- @include "fence"
--- @include "words"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local known = redis.call('HMGET', KEYS[2], 'length', 'reason', 'scored')
local base = tonumber(ARGV[2])
local first = math.max(base, tonumber(known[3] or 0))
local notes = words(ARGV[3], first - base)
if not known[1] or known[2] or #notes == 0 then
  return 0
end
local scored = first + #notes
redis.call('HSET', KEYS[2], 'scored', scored)
redis.call('XADD', KEYS[3], scored .. '-0', 'base', first, 'notes', table.concat(notes, ' '))
return #notes
