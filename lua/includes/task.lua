-- The keys of a graph. A task id is "<kind>:<rank>:<step>"; <graph> and <ready> are keys.
--
--   <graph>              hash   floor: the oldest step with a record; last: the newest submitted
--   <graph>:steps        set    the steps that have a record
--   <graph>:<step>       hash   the record of a step, deleted when all its tasks are complete:
--       left                    how many of its tasks are not complete; absent until submitted
--       <id>                    't' plain, 'a' to be announced; 'D' .. payload once complete
--       <id>#                   how many predecessors are not complete (only if there were any)
--       <id>>                   the ids that wait for it, each followed by a space
--       <id>$                   the payloads of its predecessors so far
--   <ready>:<rank>       list   "<id> <payloads>" of every announced task that became ready
--
-- A graph is of no use once its ranks have lost Redis, because the epoch ends then. So it goes neither
-- to the append-only file nor to replicas, which would cost some microseconds per step, and a
-- kilobyte of the file per rank and step.
redis.set_repl(redis.REPL_NONE)

-- rank_and_step(id) -> two strings, or nil if it is not an id.
local function rank_and_step(id)
  return string.match(id, '^%a:(%d+):(%d+)$')
end
