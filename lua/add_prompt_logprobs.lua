-- add_prompt_logprobs: publishes the log-probabilities of a prompt to the readers of its request.
--
-- KEYS[1]  epoch
-- KEYS[2]  request
-- KEYS[3]  events of the request
-- ARGV[1]  epoch of the caller
-- ARGV[2]  base: the position of the first token
-- ARGV[3]  log-probabilities of the tokens (opaque, one text per token), joined by spaces
-- Reply    for how many tokens they were published
-- Errors   STALE
--
-- Idempotent: positions that were published before are skipped, and so are requests that have ended,
-- even if the log no longer has them.
--- @include "fence"
--- @include "split_words"

local stale = fence(KEYS[1], ARGV[1])
if stale then
  return stale
end
local known = redis.call('HMGET', KEYS[2], 'length', 'reason', 'scored')
local base = tonumber(ARGV[2])
local first = math.max(base, tonumber(known[3] or 0))
local logprobs = split_words(ARGV[3], first - base)
if not known[1] or known[2] or #logprobs == 0 then
  return 0
end
local scored = first + #logprobs
redis.call('HSET', KEYS[2], 'scored', scored)
redis.call('XADD', KEYS[3], scored .. '-0', 'base', first, 'logprobs', table.concat(logprobs, ' '))
return #logprobs
