--- @include "refuse"

-- How a request lies in Redis; <request> is "<prefix>:<id>". The only durable state.
--
--   <request>          hash    asked: what was asked for (opaque); length: of the sequence so
--                              far, prompt included; prompt: that of the prompt;
--                              reason: why it finished, if it did;
--                              cancelled: with what reason the head is to end it, if it is;
--                              scored: up to which position the prompt was told of;
--                              stuck: how many clusters in a row have failed while they
--                              decoded it, its length being stuck_at all the time
--   <request>:events   stream  an entry "<length after it>-0" per accepted piece, with base
--                              and tokens, and notes if there are any (opaque words, one per
--                              token); at last "<length>-1" with the reason, and prefill_ns and
--                              cached if the head that ended it knows what its first token took
--                              and how much of its prompt was in KV. Before them, of a prompt whose tokens are to be told of,
--                              "<position>-0" with base and notes
--   <request>:reports  stream  an entry per report of a rank
--
-- Two sorted sets hold the ids of those that wait (queue) and of those that an epoch has taken
-- (admitted), each with the score priority * 2^32 + id: the least priority is first, and of equal
-- ones who came first.
--
-- unknown(id) -> the error reply for a request that the log does not have.
local function unknown(id)
  return refuse('REQUEST', 'request ' .. id .. ' is not in the log')
end
