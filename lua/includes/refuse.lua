-- refuse(code, detail) -> the error reply "<code> <detail>".
--
-- The codes, and the exceptions they become, are the table ERRORS in
-- pipespec/controller/scripts.py:
--   STALE    the caller belongs to an epoch that is over
--   GRAPH    a task, an edge or a step that cannot be
--   REQUEST  the request log cannot do that
local function refuse(code, detail)
  return redis.error_reply(code .. ' ' .. detail)
end
